// A button that copies a text.
import { html, useRef, useState } from "./html.js";

const COPIED_MS = 1500;

// A button that copies a text, or what a function returns, and says that it did.
export function CopyButton({ text, describes = "Copy", kind = "quiet" }) {
  const [result, setResult] = useState("");
  const timer = useRef(0);
  const copy = async () => {
    const isCopied = await copyText(typeof text === "function" ? text() : text).then(() => true, () => false);
    setResult(isCopied ? "Copied" : "Not copied: the browser does not allow it");
    clearTimeout(timer.current);
    timer.current = setTimeout(() => setResult(""), COPIED_MS);
  };
  return html`<button type="button" class=${kind} onClick=${copy} aria-label=${result ? undefined : describes}>${result || "Copy"}</button>`;
}

// The clipboard is there for https and localhost only; elsewhere a selection is copied.
async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "visually-hidden";
  document.body.append(area);
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  if (!isCopied) throw new Error("not copied");
}
