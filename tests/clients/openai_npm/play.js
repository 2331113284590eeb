// The program of a user of npm's `openai`. The SDK takes base URL and key from the environment.

import OpenAI from "openai";

const WORLD = { c: "7", d: "3" };
const get = ({ key }) => `${key} = ${WORLD[key] ?? "nothing"}`;
const parameters = { type: "object", properties: { key: { type: "string" } }, required: ["key"] };
const tool = { type: "function", function: { name: "get", description: "Gets a value.", parameters } };
const runnable = { type: "function", function: { ...tool.function, function: get, parse: JSON.parse } };
const client = new OpenAI();

const scenes = {
  async tool_loop() {
    const messages = [{ role: "user", content: "value of c?" }];
    for (;;) {
      const completion = await client.chat.completions.create({ model: "gpt-4o-mini", messages, tools: [tool] });
      const message = completion.choices[0].message;
      messages.push(message);
      if (!message.tool_calls) return { answer: message.content };
      for (const call of message.tool_calls) {
        const content = get(JSON.parse(call.function.arguments));
        messages.push({ role: "tool", tool_call_id: call.id, content });
      }
    }
  },

  async run_tools() {
    const messages = [{ role: "user", content: "value of c and d?" }];
    const runner = client.chat.completions.runTools({ model: "gpt-4o-mini", messages, tools: [runnable] });
    return { answer: await runner.finalContent() };
  },

  async run_tools_streamed() {
    const messages = [{ role: "user", content: "value of c?" }];
    const runner = client.chat.completions.runTools({
      model: "gpt-4o-mini", messages, tools: [runnable], stream: true,
    });
    let deltas = "";
    runner.on("content", (delta) => { deltas += delta; });
    return { answer: await runner.finalContent(), deltas };
  },

  async stream() {
    const messages = [{ role: "user", content: "value of c?" }];
    const stream = await client.chat.completions.create({
      model: "m", messages, stream: true, stream_options: { include_usage: true },
    });
    let text = "", finish = null, usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      finish = chunk.choices[0]?.finish_reason ?? finish;
      usage = chunk.usage ?? usage;
    }
    return { text, finish, completion_tokens: usage.completion_tokens };
  },

  async responses() {
    const flat = { type: "function", ...tool.function };
    const first = await client.responses.create({ model: "m", input: "value of c?", tools: [flat] });
    const call = first.output.find((item) => item.type === "function_call");
    const output = get(JSON.parse(call.arguments));
    const second = await client.responses.create({
      model: "m",
      input: [{ type: "function_call_output", call_id: call.call_id, output }],
      tools: [flat],
      previous_response_id: first.id,
    });
    return { answer: second.output_text };
  },

  async errors() {
    const hello = { model: "m", messages: [{ role: "user", content: "hello" }] };
    const stranger = new OpenAI({ apiKey: "wrong" });
    return {
      bad_value: await raised(() => client.chat.completions.create({ ...hello, temperature: 3 })),
      bad_key: await raised(() => stranger.chat.completions.create(hello)),
      no_such_version: await raised(() => client.chat.completions.create({ ...hello, model: "policy@99999" })),
    };
  },
};

async function raised(call) {
  try {
    await call();
  } catch (error) {
    return [error.constructor.name, error.type, error.code, Boolean(error.requestID)];
  }
  return null;
}

console.log(JSON.stringify(await scenes[process.argv[2]]()));
