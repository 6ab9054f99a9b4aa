// @openai/agents: agents with tools, handoffs, sessions and typed output over both APIs of OpenAI.

import assert from "node:assert/strict";
import test from "node:test";
import { Agent, OpenAIChatCompletionsModel, OpenAIResponsesModel, run, setTracingDisabled, tool } from "@openai/agents";
import OpenAI from "openai";
import { z } from "zod";
import { CALL, collect, url } from "./addresses.mjs";

setTracingDisabled(true);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "-", maxRetries: 0 });
const APIS = {
  responses: (name) => new OpenAIResponsesModel(client, name),
  chats: (name) => new OpenAIChatCompletionsModel(client, name),
};
const weather = tool({
  name: "weather",
  description: "the weather of a city",
  parameters: z.object({ city: z.string() }),
  execute: async ({ city }) => `sun in ${city}`,
});
const Color = z.object({ name: z.enum(["red", "blue"]) });

for (const [api, make] of Object.entries(APIS)) {
  test(`${api}: an agent`, async () => {
    const agent = new Agent({ name: "a", instructions: "Obey.", model: make("Scripted") });
    assert.equal((await run(agent, "say good day")).finalOutput, "good day");
  });

  test(`${api}: tools`, async () => {
    const agent = new Agent({ name: "a", model: make("Scripted"), tools: [weather] });
    assert.equal((await run(agent, CALL)).finalOutput, "the result is sun in Oslo");
  });

  test(`${api}: stream`, async () => {
    const agent = new Agent({ name: "a", model: make("Scripted"), tools: [weather] });
    const result = await run(agent, CALL, { stream: true });
    const texts = await collect(result.toTextStream());
    await result.completed;
    assert.equal(result.finalOutput, "the result is sun in Oslo");
    assert.equal(texts.join(""), "the result is sun in Oslo");
  });

  test(`${api}: handoff`, async () => {
    const other = new Agent({ name: "other", model: make("Scripted") });
    const first = Agent.create({ name: "first", model: make("Scripted"), handoffs: [other] });
    const result = await run(first, "call transfer_to_other {}");
    assert.equal(result.lastAgent.name, "other");
  });

  test(`${api}: history`, async () => {
    const agent = new Agent({ name: "a", model: make("Scripted") });
    const first = await run(agent, "say good day");
    const second = await run(agent, [...first.history, { role: "user", content: "say good night" }]);
    assert.equal(second.finalOutput, "good night");
  });

  test(`${api}: typed output`, async () => {
    const agent = new Agent({ name: "a", model: make("tiny-llama"), outputType: Color });
    assert.ok(Color.safeParse((await run(agent, "a color")).finalOutput).success);
  });
}

test("stored responses", async () => {
  const agent = new Agent({ name: "a", model: APIS.responses("Scripted") });
  const first = await run(agent, "say good day");
  const second = await run(agent, "say good night", { previousResponseId: first.lastResponseId });
  assert.equal(second.finalOutput, "good night");
});
