// Chat and completion with a text model: tokens as they come, and how likely each was.
import { events } from "./api.js";
import { html, useRef, useState } from "./html.js";

const FIELDS = [
  ["max_tokens", "max tokens", 256, "1"],
  ["temperature", "temperature", 0.7, "0.1"],
  ["top_p", "top p", 1, "0.05"],
  ["seed", "seed", "", "1"],
];

// Probable tokens are plain; the less likely one was, the darker its ground.
function Token({ text, logprob }) {
  if (logprob === null || logprob === undefined) return text;
  const probability = Math.exp(logprob);
  return html`<span class="token" style=${{ "--doubt": (1 - probability).toFixed(3) }}
    title=${`probability ${probability.toPrecision(3)}`}>${text}</span>`;
}

function Message({ role, tokens }) {
  return html`<div class=${`message ${role}`}><b>${role}</b><p>${tokens.map((t) => html`<${Token} ...${t} />`)}</p></div>`;
}

function parseChat(chunk) {
  const choice = chunk.choices?.[0];
  if (!choice) return { tokens: [], reason: null };
  const listed = choice.logprobs?.content;
  const text = choice.delta?.content ?? "";
  const tokens = listed?.length && listed.map((t) => t.token).join("") === text
    ? listed.map((t) => ({ text: t.token, logprob: t.logprob }))
    : text ? [{ text, logprob: listed?.[0]?.logprob }] : [];
  return { tokens, reason: choice.finish_reason };
}

function parseCompletion(chunk) {
  const choice = chunk.choices?.[0];
  if (!choice) return { tokens: [], reason: null };
  const logprob = choice.logprobs?.token_logprobs?.[0];
  return { tokens: choice.text ? [{ text: choice.text, logprob }] : [], reason: choice.finish_reason };
}

const textOf = (message) => message.tokens.map((token) => token.text).join("");

export function Chat({ name }) {
  const [mode, setMode] = useState("chat");
  const [messages, setMessages] = useState([]);
  const [draft, setDraft] = useState("");
  const [values, setValues] = useState(Object.fromEntries(FIELDS.map(([key, , value]) => [key, value])));
  const [facts, setFacts] = useState("");
  const [problem, setProblem] = useState("");
  const [running, setRunning] = useState(null);
  const stream = useRef(0);

  function request(history) {
    const parameters = Object.fromEntries(
      Object.entries(values).filter(([, value]) => value !== "").map(([key, value]) => [key, Number(value)]),
    );
    const common = { model: name, stream: true, stream_options: { include_usage: true }, ...parameters };
    if (mode === "chat") {
      const sent = history.map((message) => ({ role: message.role, content: textOf(message) }));
      return ["/v1/chat/completions", { ...common, messages: sent, logprobs: true }, parseChat];
    }
    return ["/v1/completions", { ...common, prompt: textOf(history.at(-1)), logprobs: 1 }, parseCompletion];
  }

  async function submit(event) {
    event.preventDefault();
    const mine = ++stream.current;
    const history = [...messages, { role: "user", tokens: [{ text: draft }] }];
    const abort = new AbortController();
    const received = [];
    const started = performance.now();
    let first = 0;
    let usage = null;
    let reason = null;
    setMessages(history);
    setDraft("");
    setProblem("");
    setFacts("");
    setRunning(abort);
    try {
      const [path, body, parse] = request(history);
      for await (const chunk of events(path, body, abort.signal)) {
        if (chunk.error) throw new Error(chunk.error.message ?? String(chunk.error));
        usage = chunk.usage ?? usage;
        const parsed = parse(chunk);
        reason = parsed.reason ?? reason;
        if (parsed.tokens.length) {
          first ||= performance.now();
          received.push(...parsed.tokens);
          setMessages([...history, { role: "assistant", tokens: [...received] }]);
        }
      }
    } catch (error) {
      if (error.name === "AbortError") reason = "stopped";
      else setProblem(error.message);
    }
    if (mine !== stream.current) return;
    setRunning(null);
    const count = usage?.completion_tokens ?? received.length;
    const seconds = (performance.now() - first) / 1000;
    const rate = first && count > 1 ? `, ${((count - 1) / seconds).toFixed(1)} tokens/s` : "";
    const wait = first ? `, first after ${(first - started).toFixed(0)} ms` : "";
    if (count || reason) setFacts(`${count} tokens${rate}${wait}, finished by ${reason ?? "?"}`);
  }

  const keys = (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) event.currentTarget.form.requestSubmit(), event.preventDefault();
  };
  return html`<div class="row">
      <label class="inline">mode <select value=${mode} onChange=${(e) => setMode(e.target.value)}>
        <option value="chat">chat</option><option value="completion">completion</option></select></label>
      ${FIELDS.map(([key, label, , step]) => html`<label class="inline">${label} <input type="number" step=${step} size="6"
        value=${values[key]} onInput=${(e) => setValues({ ...values, [key]: e.target.value })} /></label>`)}
      <button onClick=${() => setMessages([])} disabled=${running !== null || messages.length === 0}>New</button>
    </div>
    <div class="messages" aria-live="polite">${messages.map((message) => html`<${Message} ...${message} />`)}</div>
    ${facts && html`<p class="note" role="status">${facts}</p>`}
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    <form onSubmit=${submit}>
      <label for="draft">${mode === "chat" ? "message" : "prompt"}</label>
      <textarea id="draft" rows="3" value=${draft} onInput=${(e) => setDraft(e.target.value)} onKeyDown=${keys} required></textarea>
      ${running
        ? html`<button type="button" onClick=${() => running.abort()}>Stop</button>`
        : html`<button class="primary">Send</button>`}
    </form>`;
}
