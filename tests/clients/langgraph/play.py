"""The program of a user of LangChain and LangGraph: a ReAct agent over `ChatOpenAI`."""

import asyncio
import json
import sys
import warnings

import openai
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver

WORLD = {"c": "7", "d": "3"}


@tool
def get(key: str) -> str:
    """Gets the value of a key."""
    return f"{key} = {WORLD.get(key, 'nothing')}"


def agent(**more):
    return create_agent(ChatOpenAI(model="gpt-4o-mini"), tools=[get], **more)


def asked(question):
    return {"messages": [{"role": "user", "content": question}]}


def told(state):
    return [message.type for message in state["messages"]]


def invoke():
    state = agent(system_prompt="You are a helpful assistant.").invoke(asked("value of c?"))
    return {"answer": state["messages"][-1].content, "messages": told(state)}


def parallel_calls():
    state = agent().invoke(asked("value of c and d?"))
    return {"answer": state["messages"][-1].content, "messages": told(state)}


def stream():
    """Token by token, as a chat page shows it."""
    text, calls = "", 0
    for chunk, _ in agent().stream(asked("value of c?"), stream_mode="messages"):
        calls += len(getattr(chunk, "tool_call_chunks", []))
        text += chunk.content if chunk.type == "AIMessageChunk" else ""
    return {"answer": text, "call_chunks": calls}


def stream_updates():
    async def run():
        steps = [step async for step in agent().astream(asked("value of c?"), stream_mode="updates")]
        return {"steps": [next(iter(step)) for step in steps]}

    return asyncio.run(run())


def memory():
    """LangGraph's checkpointer keeps the conversation; every question sends all of it."""
    graph = agent(checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "1"}}
    return {
        "answers": [graph.invoke(asked(f"value of {key}?"), thread)["messages"][-1].content for key in "cd"]
    }


def react_agent():
    """The older constructor, which many agents still use."""
    warnings.simplefilter("ignore")
    from langgraph.prebuilt import create_react_agent

    state = create_react_agent(ChatOpenAI(model="gpt-4o-mini"), [get]).invoke(asked("value of d?"))
    return {"answer": state["messages"][-1].content, "messages": told(state)}


def forced_tool():
    message = ChatOpenAI(model="m").bind_tools([get], tool_choice="any").invoke("value of c?")
    return {
        "called": [call["name"] for call in message.tool_calls],
        "usage": message.usage_metadata is not None,
    }


def structured():
    schema = {
        "title": "value",
        "type": "object",
        "properties": {"digit": {"type": "integer"}},
        "required": ["digit"],
    }
    return {"parsed": ChatOpenAI(model="m").with_structured_output(schema).invoke("value of c?")}


def errors():
    return {
        "bad_value": raised(ChatOpenAI(model="m", temperature=3)),
        "bad_key": raised(ChatOpenAI(model="m", api_key="wrong")),
        "no_such_version": raised(ChatOpenAI(model="policy@99999")),
    }


def raised(model):
    try:
        model.invoke("hello")
    except openai.APIStatusError as error:
        return [type(error).__name__, error.type, error.code]
    return None


print(json.dumps(globals()[sys.argv[1]]()))
