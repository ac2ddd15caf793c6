// openai for Node and the AI SDK: `node node.mjs URL`, in a folder with their packages.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamObject, streamText, tool } from "ai";
import OpenAI from "openai";
import { z } from "zod";

const [url, which] = process.argv.slice(2);
const ask = "What is 12 + 30?";
const answer = "12 + 30 = 42";
const options = { temperature: 0, maxOutputTokens: 60, prompt: ask, maxRetries: 0 };
const person = z.object({ name: z.string().max(8), age: z.number().int().min(0).max(99) });

async function openai() {
  const client = new OpenAI({ baseURL: url, apiKey: "x", maxRetries: 0 });
  const body = { model: "tiny", messages: [{ role: "user", content: ask }], temperature: 0 };
  const whole = await client.chat.completions.create(body);
  assert.equal(whole.choices[0].message.content, answer);
  let text = "";
  for await (const chunk of await client.chat.completions.create({ ...body, stream: true }))
    text += chunk.choices[0]?.delta?.content ?? "";
  assert.equal(text, answer);
  const reply = await client.responses.create({ model: "tiny", input: ask, temperature: 0 });
  assert.equal(reply.output_text, answer);
  await assert.rejects(client.chat.completions.create({ ...body, top_p: 7 }), OpenAI.BadRequestError);
}

async function aiSdk() {
  const compatible = createOpenAICompatible({
    name: "here", baseURL: url, apiKey: "x", supportsStructuredOutputs: true,
  });
  const provider = createOpenAI({ baseURL: url, apiKey: "x" });
  for (const model of [compatible("tiny"), provider.chat("tiny"), provider("tiny")]) {
    assert.equal((await generateText({ ...options, model })).text, answer);
    let text = "";
    for await (const piece of streamText({ ...options, model }).textStream) text += piece;
    assert.equal(text, answer);
    const { object } = await generateObject({ ...options, model, schema: person });
    assert.ok(object.age <= 99);
    const streamed = streamObject({ ...options, model, schema: person });
    for await (const _ of streamed.partialObjectStream);
    assert.ok((await streamed.object).age <= 99);
  }
}

async function aiSdkTools() {
  const provider = createOpenAI({ baseURL: url, apiKey: "x" });
  const tools = { person: tool({ description: "tells of a person", inputSchema: person }) };
  const call = { prompt: ask, maxRetries: 0, tools, toolChoice: { type: "tool", toolName: "person" } };
  for (const model of [provider.chat("tiny"), provider("tiny")]) {
    const { toolCalls } = await generateText({ ...call, model });
    assert.ok(toolCalls[0].toolName === "person" && toolCalls[0].input.age <= 99);
    const streamed = await streamText({ ...call, model }).toolCalls;
    assert.ok(streamed[0].input.age <= 99);
  }
}

await { openai, aiSdk, aiSdkTools }[which]();
