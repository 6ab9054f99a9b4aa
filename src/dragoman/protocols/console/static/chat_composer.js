// The box below a conversation: the next message, its pictures, and the settings of the answer.
import { declared, NUMBERS } from "./chat_stream.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./html.js";

const MAX_HEIGHT_PX = 220;

function Settings({ settings, mode, details, wrong, onSettings }) {
  const set = (name, value) => onSettings({ ...settings, [name]: value });
  const holder = useRef(null);
  useEffect(() => {
    const element = holder.current.querySelector("[aria-invalid]");
    if (element?.closest("details")) element.closest("details").open = true;
    element?.focus();
  }, [wrong]);
  const mark = (name) => wrong?.setting === name && { "aria-invalid": "true" };
  const area = (name, label, rows, placeholder = "") => html`<label>${label}
    <textarea rows=${rows} ...${mark(name)} value=${settings[name]} placeholder=${placeholder} onInput=${(e) => set(name, e.target.value)} spellcheck="false"></textarea></label>`;
  const flag = (name, label, note = "") => html`<label class="flag"><input type="checkbox" checked=${settings[name]} onChange=${(e) => set(name, e.target.checked)} />
    <span>${label}${note && html`<small> ${note}</small>`}</span></label>`;
  const { tools, reasoning } = details.chat_template || {};
  const isChat = mode === "chat";
  return html`<div class="chat-settings" id="chat-settings" ref=${holder} role="group" aria-label="Settings">
    ${isChat && area("system", "system prompt", 2)}
    <div class="numbers">${NUMBERS.map(([name, label, , limits]) => html`<label>${label}
      <input type="number" ...${limits} ...${mark(name)} placeholder=${declared(details, name) ?? limits.placeholder} value=${settings[name]} onInput=${(e) => set(name, e.target.value)} /></label>`)}</div>
    ${isChat && reasoning && flag("thinks", "Think before answering")}
    ${flag("probabilities", "Token probabilities.", "The darker the background of a token, the less likely the model held it to be.")}
    <details><summary>Stop, structured output${isChat && tools ? ", tools" : ""}</summary>
      ${area("stop", "stop texts, one a line", 2)}
      ${area("schema", "JSON schema of the answer", 3, '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}')}
      ${isChat && tools && area("tools", "tools, as in OpenAI's requests", 3, '[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]')}
    </details>
    ${details.chat_template !== false && html`<label class="flag"><input type="checkbox" checked=${!isChat}
      onChange=${(e) => set("mode", e.target.checked ? "completion" : "chat")} /><span>Complete the text <small> without the chat template</small></span></label>`}
  </div>`;
}

export function Composer(p) {
  const [isOpen, setOpen] = useState(false);
  const picker = useRef(null);
  const { input, draft, images, isRunning, problem } = p;
  useEffect(() => problem?.setting && setOpen(true), [problem]);
  useLayoutEffect(() => {
    input.current.style.height = "auto";
    input.current.style.height = `${Math.min(MAX_HEIGHT_PX, input.current.scrollHeight)}px`;
  }, [draft]);
  const canSend = draft.trim() !== "" || images.length > 0;
  const submit = (event) => {
    event.preventDefault();
    if (isRunning) p.onStop();
    else if (canSend) p.onSend();
  };
  const keys = (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!isRunning && canSend) p.onSend();
  };
  const paste = (event) => {
    const { files } = event.clipboardData;
    if (files.length === 0) return;
    event.preventDefault();
    p.onFiles(files);
  };
  const label = p.mode === "chat" ? "Message" : "Text to continue";
  return html`<form class="composer" onSubmit=${submit}>
    ${!p.isAtEnd && html`<button type="button" class="to-end" onClick=${p.onEnd} aria-label="To the end of the conversation">↓</button>`}
    ${problem && html`<p class="error" role="alert">${problem.message}</p>`}
    <div class="chat-box">
      ${isOpen && html`<${Settings} settings=${p.settings} mode=${p.mode} details=${p.details} wrong=${problem} onSettings=${p.onSettings} />`}
      ${p.isEditing && html`<p class="chat-editing">This replaces your last question. <button type="button" class="quiet" onClick=${p.onCancel}>Cancel</button></p>`}
      ${images.length > 0 && html`<div class="chat-pictures">${images.map((url, i) => html`<span><img src=${url} alt=${`Picture ${i + 1}`} />
        <button type="button" class="quiet" aria-label=${`Remove picture ${i + 1}`} onClick=${() => p.onImages(images.filter((_, j) => j !== i))}>✕</button></span>`)}</div>`}
      <textarea id="draft" ref=${input} rows="1" aria-label=${label} placeholder=${label} value=${draft} enterkeyhint="send"
        onInput=${(e) => p.onDraft(e.target.value)} onKeyDown=${keys} onPaste=${paste}></textarea>
      <div class="chat-tools">
        ${p.details.vision && html`<button type="button" class="quiet" onClick=${() => picker.current.click()}>Picture</button>
          <input ref=${picker} type="file" accept="image/*" multiple hidden aria-label="Picture"
            onChange=${(e) => (p.onFiles([...e.target.files]), (e.target.value = ""))} />`}
        <button type="button" class="quiet" aria-expanded=${isOpen} aria-controls="chat-settings" onClick=${() => setOpen(!isOpen)}>Settings</button>
        <button type="button" class="quiet" disabled=${p.isEmpty} onClick=${p.onNew}>New chat</button>
        <button class="primary" disabled=${!isRunning && !canSend}>${isRunning ? "Stop" : "Send"}</button>
      </div>
    </div>
  </form>`;
}
