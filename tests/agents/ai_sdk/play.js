// The program of a Vercel AI SDK user. Each provider gets base URL and key as its documentation says.

import { readFile, writeFile } from "node:fs/promises";

import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, isStepCount, streamText, tool } from "ai";
import { z } from "zod";

const { AGENT_PROVIDER, OPENAI_BASE_URL: baseURL, OPENAI_API_KEY: apiKey } = process.env;
const providers = {
  compatible: () => createOpenAICompatible({ name: "weir", baseURL, apiKey })("policy"),
  chat: () => createOpenAI().chat("gpt-4o-mini"),
  responses: () => createOpenAI()("gpt-5"),
  anthropic: () => createAnthropic({ baseURL })("claude-sonnet-4-5"),
};
const model = providers[AGENT_PROVIDER]();
const tools = {
  write: tool({
    description: "Writes a file.",
    inputSchema: z.object({ path: z.string(), text: z.string() }),
    execute: async ({ path, text }) => { await writeFile(path, text); return `wrote ${path}`; },
  }),
  read: tool({
    description: "Reads a file.",
    inputSchema: z.object({ path: z.string() }),
    execute: async ({ path }) => `${path} has ${await readFile(path, "utf8")}`,
  }),
};
const QUESTIONS = ["Save the word weir in word.txt.", "Read it back."];
const settings = { model, tools, system: "You are a helpful assistant.", stopWhen: isStepCount(5) };

const scenes = {
  async conversation() {
    const messages = [], answers = [];
    for (const content of QUESTIONS) {
      messages.push({ role: "user", content });
      const result = await generateText({ ...settings, messages });
      messages.push(...result.responseMessages);
      answers.push(result.text);
    }
    return { answers };
  },

  async streamed() {
    const messages = [], answers = [];
    let pieces = 0;
    for (const content of QUESTIONS) {
      messages.push({ role: "user", content });
      const result = streamText({ ...settings, messages, onError: ({ error }) => { throw error; } });
      let text = "";
      for await (const piece of result.textStream) { text += piece; pieces += 1; }
      messages.push(...await result.responseMessages);
      answers.push(text);
    }
    return { answers, pieces };
  },

  async object() {
    const schema = z.object({ word: z.string(), letters: z.number() });
    const { object } = await generateObject({ model, schema, prompt: QUESTIONS[0] });
    return { object };
  },
};

console.log(JSON.stringify(await scenes[process.argv[2]]()));
