// The last requests of the server, and one of them by its id: where its time went.
import { ApiError, isDenial, read, sent } from "./api.js";
import { html, Problem, useEffect, useState } from "./html.js";
import { Sent } from "./replay.js";
import { duration, plural } from "./words.js";

const REFRESH_MS = 3000;
const PARTS = [
  ["parse", "parse_ms", "until the engine had the request"],
  ["queue", "queue_ms", "until its batch was dispatched"],
  ["compute", "compute_ms", "in the engine and the model"],
  ["format", "format_ms", "until the response was sent"],
];

const milliseconds = (value) => (value === null ? "–" : `${value.toFixed(value < 10 ? 3 : 1)} ms`);
const isError = ({ status }) => (typeof status === "number" ? status >= 400 || status === 0 : status !== "OK");

function Status({ request }) {
  const text = request.status === 0 ? "client disconnected" : String(request.status);
  return html`<span class=${`state ${isError(request) ? "bad" : "good"}`}>${text}</span>`;
}

const address = (id) => `#/requests/${encodeURIComponent(id)}`;

function Timeline({ request }) {
  const parts = PARTS.filter(([, key]) => request[key] !== null);
  const total = Math.max(request.total_ms, 1e-6);
  let start = 0;
  return html`<table class="timeline"><caption>Where the time went</caption>
    <thead><tr><th scope="col">part</th><th scope="col">time</th><th scope="col">share</th><th scope="col">meaning</th></tr></thead>
    <tbody>${parts.map(([name, key, meaning]) => {
      const [x, width] = [(100 * start) / total, (100 * request[key]) / total];
      start += request[key];
      return html`<tr><th scope="row">${name}</th><td class="number">${milliseconds(request[key])}</td>
        <td><svg class="share" viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label=${`${width.toFixed(0)} %`}>
          <rect class=${name} x=${x} y="1" width=${Math.max(width, 0.6)} height="8" /></svg></td><td class="note">${meaning}</td></tr>`;
    })}<tr><th scope="row">total</th><td class="number">${milliseconds(request.total_ms)}</td><td></td><td></td></tr></tbody></table>`;
}

const REASONS = {
  idle_worker: "a worker was idle", worker_free: "a worker became free", full: "it was full",
  max_wait: "its first request had waited for the maximum time", batch_delay: "the adaptive delay had ended",
};

function describeBatch(batch) {
  if (!batch) return "not merged with others";
  const { rows, calls, reason } = batch;
  return `${plural(rows, "row")} of ${plural(calls, "request")}, dispatched when ${REASONS[reason] ?? reason.replaceAll("_", " ")}`;
}

function Details({ request }) {
  const { batch, calls } = request;
  const facts = [
    ["status", html`<${Status} request=${request} />`],
    ["time", request.time],
    ["request", `${request.method} ${request.path}`],
    ["protocol", request.protocol],
    ["model", request.model && html`<a href=${`#/models/${encodeURIComponent(request.model)}`}>${request.model}</a>${request.version && ` version ${request.version}`}`],
    ["batch", describeBatch(batch)],
    ["first chunk", request.first_chunk_ms !== null && `after ${milliseconds(request.first_chunk_ms)}`],
    ["trace id", request.trace_id || "not traced"],
    ["body", `${request.received_bytes} bytes received, ${request.sent_bytes} sent`],
  ].filter(([, value]) => value);
  return html`<section class="card"><dl class="facts">${facts.map(([name, value]) => html`<dt>${name}</dt><dd>${value}</dd>`)}</dl></section>
    <section class="card scroll"><${Timeline} request=${request} />
    ${calls.length > 0 && html`<table><caption>Calls of other models</caption>
      <thead><tr><th scope="col">model</th><th scope="col">queue</th><th scope="col">total</th></tr></thead>
      <tbody>${calls.map((each) => html`<tr><td>${"– ".repeat(each.depth - 1)}${each.model}</td>
        <td class="number">${milliseconds(each.queue_ms)}</td><td class="number">${milliseconds(each.total_ms)}</td></tr>`)}</tbody></table>`}</section>`;
}

export function RequestView({ id }) {
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState("");
  const own = sent.find((request) => request.id === id);
  const load = () => read(`/console/requests/${encodeURIComponent(id)}`).then(
    ({ requests }) => (setFound(requests), setProblem("")),
    (error) => setProblem(error.message),
  );
  useEffect(() => void load(), [id]);
  return html`<h1>Request <small><code>${id}</code></small></h1>
    <p><a href="#/requests">← All requests</a></p>
    ${problem && (own ? html`<p class="note">Where its time went is not known: ${problem}</p>` : html`<${Problem} message=${problem} onRetry=${load} />`)}
    ${found?.map((request, i) => html`<${Details} key=${i} request=${request} />`)}
    ${own ? html`<${Sent} request=${own} />` : found && html`<p class="note">Bodies of requests are not kept by the server, so that only those that were sent in this tab can be replayed.</p>`}`;
}

function modelOf({ path, body }) {
  const found = /\/models\/([^/]+)/.exec(path)?.[1];
  if (found) return decodeURIComponent(found);
  const named = typeof body === "string" && body.length < 1e6 ? /"(?:model|name)":\s*"((?:[^"\\]|\\.)*)"/.exec(body)?.[1] : null;
  return named ?? "";
}

// A request of this tab in the form of those that the server lists.
const asListed = (request) => ({ ...request, model: modelOf(request), protocol: "this tab", total_ms: request.ms, queue_ms: null, compute_ms: null });

function useRequests() {
  const [listed, setListed] = useState(null);
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    let isDenied = false;
    const refresh = () => document.hidden || isDenied || read("/console/requests").then(
      (value) => (setListed(value), setProblem(null)),
      (error) => ((isDenied = isDenial(error)), setProblem(error)),
    );
    refresh();
    const timer = setInterval(refresh, REFRESH_MS);
    return () => clearInterval(timer);
  }, []);
  return { listed, problem };
}

const remembered = { text: "", status: "all", protocol: "" };

function matches(request, { text, status, protocol }) {
  if (status !== "all" && (status === "errors") !== isError(request)) return false;
  if (protocol && request.protocol !== protocol) return false;
  return `${request.model} ${request.path} ${request.id}`.toLowerCase().includes(text.toLowerCase().trim());
}

function Filter({ rows, filter, onFilter }) {
  const protocols = [...new Set(rows.map(({ protocol }) => protocol))].sort();
  const open = (event) => {
    event.preventDefault();
    if (filter.text.trim()) location.hash = address(filter.text.trim());
  };
  return html`<form class="row" role="search" onSubmit=${open}>
    <input type="search" name="id" aria-label="Search requests" placeholder="Model, path or request id" size="36" value=${filter.text} spellcheck=${false}
      onInput=${(e) => onFilter({ text: e.target.value })} />
    <select aria-label="Status" value=${filter.status} onChange=${(e) => onFilter({ status: e.target.value })}>
      <option value="all">every status</option><option value="errors">errors</option><option value="good">without errors</option></select>
    ${protocols.length > 1 && html`<select aria-label="Protocol" value=${filter.protocol} onChange=${(e) => onFilter({ protocol: e.target.value })}>
      <option value="">every protocol</option>${protocols.map((name) => html`<option value=${name}>${name}</option>`)}</select>`}
    <button>Find the id</button></form>`;
}

export function Requests() {
  const { listed, problem } = useRequests();
  const [filter, setFilter] = useState(remembered);
  const [isAll, setIsAll] = useState(false);
  const kept = listed?.requests ?? [];
  const ids = new Set(kept.map(({ id }) => id));
  const own = new Set(sent.map(({ id }) => id));
  const all = [...kept, ...sent.filter(({ id }) => !ids.has(id)).map(asListed)].sort((a, b) => b.time.localeCompare(a.time));
  const candidates = all.filter((request) => isAll || request.model || isError(request));
  const rows = candidates.filter((request) => matches(request, filter));
  const isAbsent = problem instanceof ApiError && problem.status === 404;
  const change = (values) => setFilter({ ...Object.assign(remembered, values) });
  const cell = (value) => (value === null || value === undefined ? "–" : duration(value));
  return html`<h1>Requests</h1>
    ${problem && html`<p class="error" role="alert">${isAbsent ? "This address does not list requests: see the admin port." : problem.message}</p>`}
    ${listed?.kept === 0 && html`<p class="note">The server keeps no requests. Start it with <code>--recent-requests 1000</code> to see those of all clients here, and where their time goes.${" "}
      ${sent.length > 0 ? "These were sent in this tab." : "Those that you send in this tab are listed as well."}</p>`}
    ${(listed || sent.length > 0) && html`<${Filter} rows=${candidates} filter=${filter} onFilter=${change} />`}
    ${kept.length > 0 && html`<p><label class="inline"><input type="checkbox" checked=${isAll} onChange=${(e) => setIsAll(e.target.checked)} />
        also requests without a model</label></p>`}
    ${rows.length > 0 && html`<div class="card scroll"><table class="models requests"><thead><tr><th scope="col">time</th><th scope="col">status</th><th scope="col">model</th><th scope="col">request</th>
        <th scope="col" class="number">queue</th><th scope="col" class="number">compute</th><th scope="col" class="number">total</th><th scope="col">id</th></tr></thead>
      <tbody>${rows.map((request) => html`<tr key=${request.id + request.time}><td>${request.time.slice(11, 23)}</td>
        <td><${Status} request=${request} /></td><td>${request.model || "–"}</td><td class="reason">${request.method} ${request.path}</td>
        <td class="number">${cell(request.queue_ms)}</td><td class="number">${cell(request.compute_ms)}</td><td class="number">${cell(request.total_ms)}</td>
        <td class="id"><a href=${address(request.id)}><code>${request.id}</code></a> ${own.has(request.id) && html`<span class="badge" title="Sent in this tab: it can be sent again">this tab</span>`}</td>
        </tr>`)}</tbody></table></div>`}
    ${listed && rows.length === 0 && html`<p class="note">${all.length > 0 ? "No request matches." : listed.kept > 0 ? "None yet." : ""}</p>`}`;
}
