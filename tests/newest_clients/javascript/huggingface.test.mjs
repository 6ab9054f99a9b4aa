// @huggingface/inference: text generation, chats and embeddings of an endpoint.

import assert from "node:assert/strict";
import test from "node:test";
import { InferenceClient } from "@huggingface/inference";
import { CALL, collect, KEY, keyed, url, user } from "./addresses.mjs";

const at = (endpointUrl, token = "hf_x") => new InferenceClient(token, { endpointUrl });
const client = at(`${url}/models/Scripted`);

// The client sends its address as the name of the model, unless it gets one.
for (const more of [{}, { model: "Scripted" }]) {
  test(`text generation ${JSON.stringify(more)}`, async () => {
    const result = await client.textGeneration({ inputs: "say good day", ...more });
    assert.equal(result.generated_text, "good day");
  });

  test(`text generation stream ${JSON.stringify(more)}`, async () => {
    const parts = await collect(client.textGenerationStream({ inputs: "say good day", ...more }));
    assert.ok(parts.length > 1);
  });

  test(`chat ${JSON.stringify(more)}`, async () => {
    const result = await client.chatCompletion({ messages: user("say good day"), ...more });
    assert.equal(result.choices[0].message.content, "good day");
    const chunks = await collect(client.chatCompletionStream({ messages: user("say good day"), ...more }));
    assert.equal(chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "").join(""), "good day");
  });
}

test("the address of the server, whose only model is meant", async () => {
  const one = at(keyed, KEY);
  assert.equal((await one.chatCompletion({ messages: user("say a") })).choices[0].message.content, "a");
  assert.equal((await one.textGeneration({ inputs: "say a" })).generated_text, "a");
  const parts = await collect(one.textGenerationStream({ inputs: "say a b" }));
  assert.ok(parts.length > 1);
});

test("parameters", async () => {
  const cut = await client.chatCompletion({ messages: user("say a b c"), max_tokens: 2 });
  assert.deepEqual([cut.choices[0].message.content, cut.choices[0].finish_reason], ["a b", "length"]);
  const tiny = at(`${url}/models/tiny-llama`);
  const options = { messages: user("the cat"), seed: 1, temperature: 0.9, max_tokens: 5 };
  const [first, again] = [await tiny.chatCompletion(options), await tiny.chatCompletion(options)];
  assert.equal(first.choices[0].message.content, again.choices[0].message.content);
});

test("tools", async () => {
  const tools = [{ type: "function", function: { name: "weather", parameters: { type: "object", properties: { city: { type: "string" } } } } }];
  const { choices } = await client.chatCompletion({ messages: user(CALL), tools });
  const [call] = choices[0].message.tool_calls;
  assert.deepEqual(JSON.parse(call.function.arguments), { city: "Oslo" });
  const messages = [...user(CALL), choices[0].message, { role: "tool", tool_call_id: call.id, content: "sun" }];
  assert.equal((await client.chatCompletion({ messages, tools })).choices[0].message.content, "the result is sun");
});

test("structured output", async () => {
  const schema = { type: "object", properties: { a: { enum: [1, 2] } }, required: ["a"], additionalProperties: false };
  const result = await at(`${url}/models/tiny-llama`).chatCompletion({
    messages: user("a"),
    response_format: { type: "json_schema", json_schema: { name: "a", schema } },
    max_tokens: 60,
  });
  assert.ok([1, 2].includes(JSON.parse(result.choices[0].message.content).a));
});

test("feature extraction", async () => {
  const result = await at(`${url}/models/Angles/embed`).featureExtraction({ inputs: "60" });
  assert.ok(Math.abs([result].flat(2)[0] - 0.5) < 1e-6);
});

test("errors", async () => {
  await assert.rejects(at(`${url}/models/none`).chatCompletion({ messages: user("a") }), (error) => error.httpResponse.status === 404);
  await assert.rejects(client.chatCompletion({ messages: user("a"), temperature: 9 }), (error) => error.httpResponse.status === 400);
  await assert.rejects(at(keyed, "hf_wrong").chatCompletion({ messages: user("a") }), (error) => error.httpResponse.status === 401);
});

test("aborts", async () => {
  const signal = AbortSignal.timeout(500);
  await assert.rejects(client.chatCompletion({ messages: user("wait") }, { signal }));
  assert.equal((await client.chatCompletion({ messages: user("say a") })).choices[0].message.content, "a");
});
