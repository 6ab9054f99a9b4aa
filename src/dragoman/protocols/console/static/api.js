// Requests to the server that this page comes from.

const KEY = "dragoman-api-key"; // for this tab, until it is closed
export const root = new URL("../..", import.meta.url).pathname.replace(/\/$/, "");

export const NEEDS_KEY = "needs-key"; // an event of the window: the server accepts no key, or no longer this one

export const storedKey = () => sessionStorage.getItem(KEY) ?? "";

export function storeKey(key) {
  if (!key) return sessionStorage.clear(), (sent.length = 0); // with the key, also the chats and requests
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    sessionStorage.clear(); // chats have filled it
    sessionStorage.setItem(KEY, key);
  }
  return undefined;
}

// The requests that a person has sent in this tab, the last one first, without keys. In memory only, within limits.
export const sent = [];
const MAX_SENT = 200;
const MAX_SENT_BYTES = 20_000_000; // of bodies
const sizeOf = (body) => body?.size ?? body?.length ?? 0;

function keep(entry) {
  sent.unshift(entry);
  let bytes = 0;
  const end = sent.findIndex(({ body }) => (bytes += sizeOf(body)) > MAX_SENT_BYTES);
  if (end >= 0) sent.length = end;
  sent.length = Math.min(sent.length, MAX_SENT);
}

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const LONG_INTEGER = /(?<![.\d])\d{16}/;

// JSON, or with the literals that `nonfinite = "literal"` adds to it: NaN becomes null as elsewhere.
export function parseJson(text) {
  try {
    return parseExact(text);
  } catch (error) {
    if (!/NaN|Infinity/.test(text)) throw error;
    return parseExact(text.replace(/"[^"\\]*(?:\\.[^"\\]*)*"|NaN|Infinity/g, (found) => ({ NaN: "null", Infinity: "1e999" })[found] ?? found));
  }
}

// Integers beyond 2^53 become BigInt, since a number would change them. Older browsers lack `context`: they round.
function parseExact(text) {
  if (!LONG_INTEGER.test(text)) return JSON.parse(text); // several times as fast
  return JSON.parse(text, (_, value, context) =>
    typeof value === "number" && !Number.isSafeInteger(value) && /^-?\d+$/.test(context?.source ?? "")
      ? BigInt(context.source)
      : value,
  );
}

export const roundsIntegers = typeof parseJson("9007199254740993") !== "bigint";

function errorMessage(text, status) {
  try {
    const { error, message } = JSON.parse(text);
    const found = error?.message ?? error ?? message;
    if (typeof found === "string") return found;
  } catch {
    // not JSON
  }
  return text.slice(0, 500) || `the server answered ${status}`;
}

// What the page asks for itself has paths of its own, which are not counted; the rest is what a person sends.
const ASKED = /^\/(metrics|ModelInfo|InputSizes|OutputSizes|v2(\/repository\/(status|index)|\/models(\/[^/]+(\/versions\/[^/]+)?(\/stats|\/openapi\.json)?)?)?)(\?|$)/;
const isOwn = (path) => path.startsWith("/console/") || ASKED.test(path);
const addressOf = (path) => (ASKED.test(path) ? `/console${path}` : path);
const listeners = new Set();

// Call a function after each request of a person; return a function that ends this.
export function afterRequests(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

const isOfPerson = (path, method) => method === "POST" && !isOwn(path);

function notify(path, method, response) {
  if (!isOfPerson(path, method)) return;
  const entry = sent.find((each) => each.response === response);
  if (entry && response) Object.assign(entry, { ms: performance.now() - entry.started, response: null });
  listeners.forEach((listener) => listener());
}

const isEncoded = (body) => body === undefined || typeof body === "string" || body instanceof Blob;

// Send a request and return the response. `body` is text, a Blob, or a value that is sent as JSON. Throws ApiError.
export async function send(path, { method = "GET", body, signal, headers: own = {} } = {}) {
  const headers = {};
  const key = storedKey();
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  Object.assign(headers, own);
  const encoded = isEncoded(body) ? body : JSON.stringify(body);
  const started = performance.now();
  let response;
  try {
    response = await fetch(root + addressOf(path), {
      method,
      headers,
      signal,
      body: encoded,
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "the server cannot be reached");
  }
  if (isOfPerson(path, method)) {
    const id = response.headers.get("x-request-id") ?? "";
    const ms = performance.now() - started;
    keep({ id, time: new Date().toISOString(), method, path, body: encoded, headers: own, status: response.status, started, ms,
      response: response.ok ? response : null });
  }
  if (!response.ok) {
    const error = new ApiError(response.status, errorMessage(await response.text(), response.status));
    if (error.status === 401 && key === storedKey()) dispatchEvent(new CustomEvent(NEEDS_KEY, { detail: error }));
    throw error;
  }
  return response;
}

// Send a request and return the parsed JSON, the time in milliseconds and the id of the request.
export async function call(path, options) {
  const started = performance.now();
  let response, text;
  try {
    response = await send(path, options);
    text = await response.text();
  } finally {
    notify(path, options?.method, response);
  }
  return {
    data: text ? parseJson(text) : null,
    ms: performance.now() - started,
    id: response.headers.get("x-request-id") ?? "",
  };
}

export const read = async (path, options) => (await call(path, options)).data;

export const isDenial = ({ status }) => [403, 404].includes(status);
const denied = new Set(); // paths that were denied, each with the key: they are not asked for again

// Return the response of a path, null if this caller may not use it. Throws ApiError for other errors, such as overload.
export async function sendIfAllowed(path, options) {
  const asked = `${path} ${storedKey()}`;
  if (denied.has(asked)) return null;
  try {
    return await send(path, options);
  } catch (error) {
    if (!(error instanceof ApiError) || error.status === 0) throw error;
    if (!isDenial(error)) throw error; // perhaps not the next time
    denied.add(asked);
    return null;
  }
}

export async function readIfAllowed(path, options) {
  const response = await sendIfAllowed(path, options);
  return response && parseJson(await response.text());
}

// Yield the data of server-sent events, each parsed as JSON, until the stream ends.
export async function* events(path, body, signal) {
  let response;
  try {
    response = await send(path, { method: "POST", body, signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block
          .split(/\r?\n/)
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5).trimStart())
          .join("\n");
        if (data && data !== "[DONE]") yield parseJson(data);
      }
    }
  } finally {
    notify(path, "POST", response);
  }
}

export const modelPath = (name, version) =>
  `/v2/models/${encodeURIComponent(name)}${version ? `/versions/${encodeURIComponent(version)}` : ""}`;

// Where a model says what it is, and what is read of its file.
export const aboutPath = (name, version) => modelPath(name, version).replace("/v2/", "/console/");
