// A request of this tab: its body, sending it again, and the same for other clients.
import { ApiError, parseJson, root, send, storedKey } from "./api.js";
import { CopyButton } from "./copy.js";
import { html, useState } from "./html.js";
import { saveFile } from "./save.js";
import { array, python, quote } from "./snippets.js";
import { duration } from "./words.js";

const MAX_INLINE = 20_000; // characters of a body within a snippet; a longer one is a file
const MAX_SHOWN = 20_000;
const FILE = { json: "request.json", binary: "request.bin" };

const isText = ({ body }) => typeof body === "string";
const isInline = (request) => request.body === undefined || (isText(request) && request.body.length <= MAX_INLINE);
const fileOf = (request) => (isText(request) ? FILE.json : FILE.binary);

function headersOf(request, key) {
  const sentHeaders = request.body === undefined ? [] : [["content-type", "application/json"]];
  const found = new Map([...sentHeaders, ...Object.entries(request.headers)]);
  if (key) found.set("authorization", key);
  return [...found];
}

function curl(request, url) {
  const key = storedKey() ? "Bearer $DRAGOMAN_API_KEY" : "";
  const headers = headersOf(request, key).map(([name, value]) => ` -H "${name}: ${value}"`).join("");
  const data = request.body === undefined ? "" : isInline(request) ? ` -d ${quote(request.body)}` : ` --data-binary @${fileOf(request)}`;
  return `curl -X ${request.method} ${quote(url + request.path)}${headers}${data}`;
}

function requests(request, url) {
  const key = storedKey() ? '"Bearer " + os.environ["DRAGOMAN_API_KEY"]' : "";
  const headers = headersOf(request, "").map(([name, value]) => `${JSON.stringify(name)}: ${JSON.stringify(value)}`);
  if (key) headers.push(`"authorization": ${key}`);
  const isJson = isText(request) && isInline(request);
  const data = request.body === undefined ? "" : isJson ? `, json=${python(parseJson(request.body))}` : `, data=open(${JSON.stringify(fileOf(request))}, "rb")`;
  return `${key ? "import os\n\n" : ""}import requests\n\nresponse = requests.request(${JSON.stringify(request.method)}, ${JSON.stringify(url + request.path)},\n` +
    `    headers={${headers.join(", ")}}${data})\nresponse.raise_for_status()\nprint(response.text)\n`;
}

// The call of the Python client, null for other APIs and for tensors that a literal cannot hold.
function client(request, url) {
  const found = /^\/v2\/models\/([^/]+)(?:\/versions\/([^/]+))?\/infer$/.exec(request.path);
  if (!found || !isText(request) || !isInline(request)) return null;
  const inputs = parseJson(request.body).inputs.map((tensor) => [tensor.name, tensor.data && array({ ...tensor, data: tensor.data.flat(Infinity) })]);
  if (inputs.some(([, text]) => !text)) return null;
  const [name, version] = found.slice(1).map((part) => part && JSON.stringify(decodeURIComponent(part)));
  const token = storedKey() ? ', token=os.environ["DRAGOMAN_API_KEY"]' : "";
  return `${token ? "import os\n\n" : ""}import numpy as np\n\nimport dragoman\n\nwith dragoman.Client(${JSON.stringify(url)}${token}) as client:\n` +
    `    result = client.infer(${name}, {\n${inputs.map(([input, text]) => `        ${JSON.stringify(input)}: ${text},\n`).join("")}    }${version ? `, version=${version}` : ""})\n` +
    "    for output in result:\n        print(output, result[output])\n";
}

function javascript(request, url) {
  const headers = headersOf(request, storedKey() ? "Bearer <the key>" : "");
  const body = request.body === undefined ? "" : isInline(request) ? `\n  body: ${JSON.stringify(request.body)},` : `\n  body: file, // ${fileOf(request)}`;
  return `const response = await fetch(${JSON.stringify(url + request.path)}, {\n  method: ${JSON.stringify(request.method)},\n` +
    `  headers: ${JSON.stringify(Object.fromEntries(headers))},${body}\n});\nconsole.log(await response.text());\n`;
}

// The same request for each client that can send it, as [name, text].
export function snippetsOf(request, url) {
  return [["curl", curl(request, url)], ["Python: requests", requests(request, url)], ["Python: dragoman", client(request, url)], ["JavaScript", javascript(request, url)]]
    .filter(([, text]) => text);
}

// JSON with a list of plain values in one line.
function written(value, indent = "") {
  if (value === null || typeof value !== "object") return typeof value === "bigint" ? String(value) : JSON.stringify(value);
  const isList = Array.isArray(value);
  const parts = Object.entries(value).map(([key, v]) => (isList ? "" : `${JSON.stringify(key)}: `) + written(v, `${indent}  `));
  const [open, close] = isList ? "[]" : "{}";
  if (isList && value.every((v) => v === null || typeof v !== "object")) return `[${parts.join(", ")}]`;
  return parts.length === 0 ? open + close : `${open}\n${parts.map((part) => `${indent}  ${part}`).join(",\n")}\n${indent}${close}`;
}

function pretty(text) {
  let found = text;
  try {
    if (text.length < MAX_SHOWN) found = written(parseJson(text));
  } catch {
    // not JSON
  }
  return found.length > MAX_SHOWN ? `${found.slice(0, MAX_SHOWN)}\n… ${found.length - MAX_SHOWN} characters more` : found;
}

export function Sent({ request }) {
  const [chosen, setChosen] = useState(0);
  const [answer, setAnswer] = useState(null);
  const [busy, setBusy] = useState(false);
  const found = snippetsOf(request, location.origin + root);

  async function replay() {
    if (busy) return;
    setBusy(true);
    const started = performance.now();
    const finish = (status, text) => setAnswer({ status, text: pretty(text), ms: performance.now() - started });
    try {
      const response = await send(request.path, { method: request.method, body: request.body, headers: request.headers });
      finish(response.status, await response.text());
    } catch (error) {
      finish(error instanceof ApiError ? error.status : 0, error.message);
    }
    setBusy(false);
  }

  return html`<section class="card"><h2>Send it again</h2>
      <p class="row"><button class="primary" aria-disabled=${busy} onClick=${replay}>${busy ? "Sending …" : "Replay"}</button>
        ${request.body !== undefined && html`<button onClick=${() => saveFile(fileOf(request), request.body)}>Save the body</button>`}</p>
      <div aria-live="polite">${answer && html`<p><span class=${`state ${answer.status >= 200 && answer.status < 400 ? "good" : "bad"}`}>${answer.status || "failed"}</span>
        <span class="note"> after ${duration(answer.ms)}; the first time ${request.status} after ${duration(request.ms)}</span></p><pre class="code short" tabindex="0">${answer.text}</pre>`}</div></section>
    <section class="card"><h2>From elsewhere</h2>
      <div class="row">${found.map(([title], i) => html`<button aria-pressed=${i === chosen} onClick=${() => setChosen(i)}>${title}</button>`)}
        <${CopyButton} key=${chosen} text=${found[chosen][1]} kind="" /></div>
      <pre class="code short" tabindex="0">${found[chosen][1]}</pre></section>
    ${isText(request) && html`<section class="card"><h2>Body</h2><pre class="code short" tabindex="0">${pretty(request.body)}</pre></section>`}`;
}
