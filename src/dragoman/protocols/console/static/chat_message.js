// A message of a chat: what it says, and what can be done with it.
import { describe } from "./chat_stream.js";
import { CodeBlock } from "./code_block.js";
import { CopyButton } from "./copy.js";
import { html, useState } from "./html.js";
import { Markdown } from "./markdown.js";
import { Tokens, TokenTable } from "./tokens.js";

const AUTHORS = { user: "You", assistant: "Model", tool: "Result of a tool" };

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not finished, or no JSON
  }
}

// The functions that the model calls; nobody runs them here, so their results are typed.
function Calls({ calls, onResults }) {
  const submit = (event) => {
    event.preventDefault();
    const { elements } = event.target;
    onResults(calls.map(({ id, name }, i) => ({ role: "tool", id, name, text: elements[`result-${i}`].value })));
  };
  return html`<form class="chat-calls" onSubmit=${submit}>
    ${calls.map(({ name, arguments: written }, i) => html`<div>
      <p>Calls <b>${name}</b> with</p><${CodeBlock} language="json" text=${pretty(written)} />
      ${onResults && html`<label>result of ${name} <input name=${`result-${i}`} required autocomplete="off" /></label>`}</div>`)}
    ${onResults && html`<button class="small">Send ${calls.length > 1 ? "the results" : "the result"}</button>`}</form>`;
}

function Question({ message: { text, images }, onEdit }) {
  return html`${images.length > 0 && html`<div class="chat-pictures">${images.map((url, i) => html`<img src=${url} alt=${`Picture ${i + 1} of the question`} />`)}</div>`}
    ${text && html`<div class="bubble">${text}</div>`}
    <div class="chat-actions">${onEdit && html`<button type="button" class="quiet" onClick=${onEdit}>Edit</button>`}
      ${text && html`<${CopyButton} text=${text} describes="Copy the question" />`}</div>`;
}

function Answer({ message, isMarkdown, showsTokens, isRunning, onRetry, onContinue, onResults }) {
  const [isRaw, setRaw] = useState(false);
  const { text, reasoning, calls, tokens, error, reason } = message;
  const isPart = text && calls.length === 0 && (error || ["length", "stopped"].includes(reason));
  const hasTokens = showsTokens && tokens.length > 0;
  const isDone = !isRunning;
  return html`${reasoning && html`<details class="reasoning"><summary>${isRunning && !text ? "Thinking …" : "Thoughts"}</summary><div class="chat-raw">${reasoning}</div></details>`}
    ${hasTokens
      ? html`<div class="chat-raw"><${Tokens} tokens=${tokens} /></div>`
      : text && (isMarkdown && !isRaw ? html`<${Markdown} text=${text} />` : html`<div class="chat-raw">${text}</div>`)}
    ${isRunning && !text && html`<p class="chat-writing" role="img" aria-label="The model is at work"><i></i><i></i><i></i></p>`}
    ${isDone && !text && !error && calls.length === 0 && html`<p class="note">An empty answer.</p>`}
    ${calls.length > 0 && html`<${Calls} calls=${calls} onResults=${onResults} />`}
    ${error && html`<p class="error" role="alert">${error}</p>`}
    ${isDone && html`<div class="chat-actions">
      ${text && html`<${CopyButton} text=${text} describes="Copy the answer" />`}
      ${onContinue && isPart && html`<button type="button" class="quiet" onClick=${onContinue}>Continue</button>`}
      ${onRetry && html`<button type="button" class="quiet" onClick=${onRetry}>Try again</button>`}
      ${text && isMarkdown && !hasTokens && html`<button type="button" class="quiet" aria-pressed=${isRaw} onClick=${() => setRaw(!isRaw)}>Raw text</button>`}
      ${!error && html`<span class="facts">${describe(message)}</span>`}</div>`}
    ${isDone && hasTokens && html`<${TokenTable} tokens=${tokens} />`}`;
}

export function Message({ message, isReplaced, ...options }) {
  const { role, name, text } = message;
  return html`<section class=${`message ${role}${isReplaced ? " replaced" : ""}`}>
    <h2 class="visually-hidden">${name ? `Result of ${name}` : AUTHORS[role]}</h2>
    ${role === "user" && html`<${Question} message=${message} onEdit=${options.onEdit} />`}
    ${role === "assistant" && html`<${Answer} message=${message} ...${options} />`}
    ${role === "tool" && html`<p>Result of <b>${name}</b></p><div class="chat-raw">${text}</div>`}</section>`;
}
