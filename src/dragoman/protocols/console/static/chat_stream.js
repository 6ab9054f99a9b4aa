// One answer of a text model: the request of a conversation, and the response as it grows.
import { events } from "./api.js";
import { plural } from "./words.js";

export const MAX_SEED = Number.MAX_SAFE_INTEGER;
export const CONNECTION_LOST = "The connection was lost.";
const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

// The settings with their names in requests: [name, label, default, attributes of the number].
export const NUMBERS = [
  ["temperature", "temperature", "0.7", { min: 0, max: 2, step: 0.1 }],
  ["top_p", "top p", "1", { min: 0, max: 1, step: 0.05 }],
  ["max_tokens", "max tokens", "", { min: 1, step: 1, placeholder: "no limit" }],
  ["seed", "seed", "", { step: 1, placeholder: "random" }],
  ["frequency_penalty", "frequency penalty", "", { min: -2, max: 2, step: 0.1, placeholder: "0" }],
  ["presence_penalty", "presence penalty", "", { min: -2, max: 2, step: 0.1, placeholder: "0" }],
];
const COMPLETION_TOKENS = 256; // without a chat template few texts have an end

// The value of a setting that the model declares for requests without it.
export const declared = (details, name) => details.default_parameters?.[name === "max_tokens" ? "max_new_tokens" : name];

// The settings of a new chat; a number that is not set is left to the model.
export const defaultsOf = (details) => ({
  ...Object.fromEntries(NUMBERS.map(([name, , value]) => [name, declared(details, name) === undefined ? value : ""])),
  system: "", stop: "", schema: "", tools: "", thinks: true, probabilities: false,
  mode: details.chat_template === false ? "completion" : "chat",
});

function numbers(settings) {
  const found = NUMBERS.filter(([name]) => settings[name] !== "").map(([name]) => [name, Number(settings[name])]);
  const { seed = 0, ...others } = Object.fromEntries(found);
  if (!Number.isSafeInteger(seed)) throw wrongSetting("seed", `seed: expected an integer up to ${MAX_SEED}, got ${settings.seed}`);
  return settings.seed === "" ? { seed: randomSeed(), ...others } : { seed, ...others };
}

const wrongSetting = (setting, message) => Object.assign(new Error(message), { setting });

function json(settings, name, title) {
  try {
    return JSON.parse(settings[name]);
  } catch (error) {
    throw wrongSetting(name, `${title}: ${error.message}`);
  }
}

const image = (url) => ({ type: "image_url", image_url: { url } });

function toMessage({ role, text, images, calls, id }) {
  if (role === "tool") return { role, content: text, tool_call_id: id };
  if (images?.length) return { role, content: [...images.map(image), { type: "text", text }] };
  return calls?.length ? { role, content: text || null, tool_calls: calls.map(toCall) } : { role, content: text };
}

const toCall = ({ id, name, arguments: written }) => ({ id, type: "function", function: { name, arguments: written } });

// Leave out questions without an answer, except the last one.
function answered(messages) {
  return messages.filter((message, i) => {
    const next = messages[i + 1];
    if (message.role === "assistant") return message.text || message.calls.length > 0;
    return message.role !== "user" || !next || next.role !== "assistant" || next.text || next.calls.length > 0;
  });
}

// Whether a conversation ends with an answer.
export const isPart = (messages) => messages.at(-1).role === "assistant";

// Return [path, body] for the next answer of a conversation, or for more of the one at its end. Throws an Error that names the setting, as
// `setting` too.
export function requestOf(model, details, settings, messages) {
  const stop = settings.stop.split("\n").filter(Boolean);
  const common = {
    model, stream: true, stream_options: { include_usage: true }, ...numbers(settings),
    ...(stop.length > 0 && { stop }),
    ...(settings.schema.trim() && {
      response_format: { type: "json_schema", json_schema: { name: "answer", schema: json(settings, "schema", "JSON schema") } },
    }),
  };
  if (settings.mode === "completion") {
    const most = Math.min(COMPLETION_TOKENS, Math.floor((details.max_context ?? Infinity) / 2));
    const prompt = messages.slice(isPart(messages) ? -2 : -1).map(({ text }) => text).join("");
    return ["/v1/completions", { max_tokens: most, ...common, prompt, ...(settings.probabilities && { logprobs: 1 }) }];
  }
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  const body = {
    ...common,
    messages: [...system, ...answered(messages).map(toMessage)],
    ...(settings.tools.trim() && { tools: json(settings, "tools", "tools") }),
    ...(!settings.thinks && { reasoning_effort: "none" }),
    ...(settings.probabilities && { logprobs: true }),
    ...(isPart(messages) && { add_generation_prompt: false, continue_final_message: true }),
  };
  return ["/v1/chat/completions", body];
}

// Add what a chunk contains to a message.
function add(message, { choices: [choice] = [], usage }) {
  message.usage = usage ?? message.usage;
  if (!choice) return false;
  const delta = choice.delta ?? { content: choice.text };
  const text = delta.content ?? "";
  message.text += text;
  message.reasoning += delta.reasoning_content ?? "";
  for (const { index, id, function: called } of delta.tool_calls ?? []) {
    const call = (message.calls[index] ??= { id: "", name: "", arguments: "" });
    call.id ||= id ?? "";
    call.name += called?.name ?? "";
    call.arguments += called?.arguments ?? "";
  }
  message.tokens.push(...tokensOf(choice, text));
  message.reason = choice.finish_reason ?? message.reason;
  return Boolean(text || delta.reasoning_content || delta.tool_calls);
}

// The tokens of a chunk with the logarithms of their probabilities; none if these were not requested.
function tokensOf({ delta, logprobs }, text) {
  if (!logprobs) return [];
  if (!delta) return text ? [{ text, logprob: logprobs.token_logprobs?.[0] }] : [];
  const listed = logprobs.content ?? [];
  const isSame = listed.length > 0 && listed.map(({ token }) => token).join("") === text;
  if (isSame) return listed.map(({ token, logprob }) => ({ text: token, logprob }));
  return text ? [{ text, logprob: listed[0]?.logprob }] : [];
}

const countOf = ({ usage, chunks }) => usage?.completion_tokens ?? chunks;

// Yield the message of an answer before it begins, whenever a chunk has come, and at its end, with the error if one came.
// `part`: the message that is continued, or null.
export async function* respond([path, body], signal, part) {
  const { text, reasoning, tokens } = part ?? { text: "", reasoning: "", tokens: [] };
  const message = {
    role: "assistant", text, reasoning, calls: [], tokens: [...tokens], usage: null, reason: null, error: "", seed: body.seed,
    chunks: 0, first_ms: null, streamed_ms: 0, earlier: part ? countOf(part) + (part.earlier ?? 0) : 0,
  };
  yield message;
  const started = performance.now();
  try {
    for await (const chunk of events(path, body, signal)) {
      if (chunk.error) throw new Error(chunk.error.message ?? String(chunk.error));
      if (add(message, chunk)) {
        message.chunks++;
        message.first_ms ??= performance.now() - started;
        message.streamed_ms = performance.now() - started - message.first_ms;
      }
      yield message;
    }
  } catch (error) {
    if (error.name === "AbortError") message.reason = "stopped";
    else message.error = error instanceof TypeError ? CONNECTION_LOST : error.message; // as the stream of a response says it
  }
  yield message;
}

const MIN_STREAMED_MS = 50; // a rate of less would be noise
const REASONS = { length: "cut off at max tokens", stopped: "stopped", tool_calls: "calls a tool" };

// Facts of an answer as a text. The rate is that after the first chunk.
export function describe({ usage, chunks, first_ms: first, streamed_ms: streamed, seed, reason, earlier = 0 }) {
  const count = countOf({ usage, chunks });
  return [
    plural(count + earlier, "token"),
    streamed > MIN_STREAMED_MS && `${((count * (chunks - 1) * 1000) / (chunks * streamed)).toFixed(1)} tokens/s`,
    first !== null && `first after ${first < 1000 ? `${first.toFixed(0)} ms` : `${(first / 1000).toFixed(1)} s`}`,
    `${earlier > 0 ? "continued with " : ""}seed ${seed}`,
    reason && (REASONS[reason] ?? `finished by ${reason}`),
  ].filter(Boolean).join(" · ");
}
