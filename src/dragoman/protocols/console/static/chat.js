// Chat and completion with a text model: tokens as they come, their rate, seed and finish reason.
import { events } from "./api.js";
import { html, useRef, useState } from "./html.js";
import { parseChat, parseCompletion, Tokens, TokenTable } from "./tokens.js";

const FIELDS = [
  ["max_tokens", "max tokens", 256, { min: 1, step: 1 }],
  ["temperature", "temperature", 0.7, { min: 0, step: 0.1 }],
  ["top_p", "top p", 1, { min: 0, max: 1, step: 0.05 }],
  ["seed", "seed", "", { step: 1, placeholder: "random" }],
];

const textOf = (message) => message.tokens.map((token) => token.text).join("");
const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

// Times of a response as text. The rate is that after the first chunk.
function describe({ started, first, last, tokens, first_tokens: early, usage, seed, reason }) {
  const count = usage?.completion_tokens ?? tokens.length;
  const seconds = (last - first) / 1000;
  const found = [`${count} token${count === 1 ? "" : "s"}`];
  if (first && count > early && seconds > 0) found.push(`${((count - early) / seconds).toFixed(1)} tokens/s`);
  if (first) found.push(`first after ${(first - started).toFixed(0)} ms`);
  found.push(`seed ${seed}`);
  if (reason) found.push(`finished by ${reason}`);
  return found.join(", ");
}

function Message({ role, tokens, facts }) {
  return html`<div class=${`message ${role}`}><b>${role}</b><p><${Tokens} tokens=${tokens} /></p>
    ${facts && html`<p class="facts">${facts}</p>`}
    ${role === "assistant" && html`<${TokenTable} tokens=${tokens} />`}</div>`;
}

function requestOf(mode, name, values, history) {
  const set = Object.entries(values).filter(([, value]) => value !== "");
  const parameters = Object.fromEntries(set.map(([key, value]) => [key, Number(value)]));
  if (parameters.seed !== undefined && !Number.isSafeInteger(parameters.seed)) {
    throw new Error(`seed: expected an integer up to ${Number.MAX_SAFE_INTEGER}, got ${values.seed}`);
  }
  const common = { model: name, stream: true, stream_options: { include_usage: true }, seed: randomSeed(), ...parameters };
  if (mode === "chat") {
    const sent = history.map((message) => ({ role: message.role, content: textOf(message) }));
    return ["/v1/chat/completions", { ...common, messages: sent, logprobs: true }, parseChat];
  }
  return ["/v1/completions", { ...common, prompt: textOf(history.at(-1)), logprobs: 1 }, parseCompletion];
}

// Yield what is known of a response whenever a chunk has come, and once at its end. Throws the server's error.
async function* respond([path, body, parse], signal) {
  const state = { started: performance.now(), first: 0, last: 0, tokens: [], first_tokens: 0, usage: null, seed: body.seed, reason: null };
  try {
    for await (const chunk of events(path, body, signal)) {
      if (chunk.error) throw new Error(chunk.error.message ?? String(chunk.error));
      const { tokens, reason } = parse(chunk);
      state.usage = chunk.usage ?? state.usage;
      state.reason = reason ?? state.reason;
      if (tokens.length > 0) {
        state.last = performance.now();
        state.first ||= state.last;
        state.first_tokens ||= tokens.length;
        state.tokens.push(...tokens);
      }
      yield state;
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    state.reason = "stopped";
    yield state;
  }
}

function Settings({ mode, values, onMode, onValues, children }) {
  return html`<div class="row chat-settings">
    <label class="inline">mode <select value=${mode} onChange=${(e) => onMode(e.target.value)}>
      <option value="chat">chat</option><option value="completion">completion</option></select></label>
    ${FIELDS.map(([key, label, , limits]) => html`<label class="inline">${label} <input type="number" ...${limits}
      value=${values[key]} onInput=${(e) => onValues({ ...values, [key]: e.target.value })} /></label>`)}
    ${children}</div>`;
}

export function Chat({ name, details }) {
  const [mode, setMode] = useState(details.chat_template !== false ? "chat" : "completion");
  const [messages, setMessages] = useState([]);
  const [draft, setDraft] = useState("");
  const [values, setValues] = useState(Object.fromEntries(FIELDS.map(([key, , value]) => [key, value])));
  const [problem, setProblem] = useState("");
  const [running, setRunning] = useState(null);
  const stream = useRef(0);

  async function submit(event) {
    event.preventDefault();
    const mine = ++stream.current;
    const history = [...messages, { role: "user", tokens: [{ text: draft }] }];
    const abort = new AbortController();
    setMessages(history);
    setDraft("");
    setProblem("");
    setRunning(abort);
    try {
      for await (const state of respond(requestOf(mode, name, values, history), abort.signal)) {
        if (mine !== stream.current) return;
        if (state.tokens.length > 0 || state.reason) {
          setMessages([...history, { role: "assistant", tokens: [...state.tokens], facts: describe(state) }]);
        }
      }
    } catch (error) {
      setProblem(error.message);
    }
    if (mine === stream.current) setRunning(null);
  }

  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) event.currentTarget.form.requestSubmit(), event.preventDefault();
  };
  return html`<${Settings} mode=${mode} values=${values} onMode=${setMode} onValues=${setValues}>
      <button onClick=${() => setMessages([])} disabled=${running !== null || messages.length === 0}>New</button></${Settings}>
    <div class="messages" aria-live="polite" aria-busy=${running !== null}>${messages.map((message) => html`<${Message} ...${message} />`)}</div>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <form onSubmit=${submit}>
      <label for="draft">${mode === "chat" ? "message" : "prompt"}</label>
      <textarea id="draft" rows="3" value=${draft} onInput=${(e) => setDraft(e.target.value)} onKeyDown=${keys} required></textarea>
      ${running
        ? html`<button type="button" onClick=${() => running.abort()}>Stop</button>`
        : html`<button class="primary">Send</button>`}
    </form>`;
}
