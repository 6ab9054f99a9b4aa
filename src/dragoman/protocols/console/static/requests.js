// The last requests of the server, and one of them by its id: where its time went.
import { ApiError, read } from "./api.js";
import { html, useEffect, useState } from "./html.js";

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

function Find({ id }) {
  const submit = (event) => {
    event.preventDefault();
    location.hash = address(event.target.elements.id.value.trim());
  };
  return html`<form class="row" onSubmit=${submit}><label class="inline">request id
    <input name="id" size="36" value=${id} required spellcheck=${false} /></label><button>Find</button></form>`;
}

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
const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`;

function describeBatch(batch) {
  if (!batch) return "not merged with others";
  const { rows, calls, reason } = batch;
  return `${count(rows, "row")} of ${count(calls, "request")}, dispatched when ${REASONS[reason] ?? reason.replaceAll("_", " ")}`;
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
    <section class="card"><${Timeline} request=${request} />
    ${calls.length > 0 && html`<table><caption>Calls of other models</caption>
      <thead><tr><th scope="col">model</th><th scope="col">queue</th><th scope="col">total</th></tr></thead>
      <tbody>${calls.map((each) => html`<tr><td>${"– ".repeat(each.depth - 1)}${each.model}</td>
        <td class="number">${milliseconds(each.queue_ms)}</td><td class="number">${milliseconds(each.total_ms)}</td></tr>`)}</tbody></table>`}</section>`;
}

export function RequestView({ id }) {
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    read(`/console/requests/${encodeURIComponent(id)}`).then(
      ({ requests }) => (setFound(requests), setProblem("")),
      (error) => setProblem(error.message),
    );
  }, [id]);
  return html`<h1>Request <small><code>${id}</code></small></h1><${Find} id=${id} key=${id} />
    <p><a href="#/requests">All recent requests</a></p>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    ${found?.map((request, i) => html`<${Details} key=${i} request=${request} />`)}`;
}

function useRequests() {
  const [listed, setListed] = useState(null);
  const [problem, setProblem] = useState(null);
  useEffect(() => {
    const refresh = () => document.hidden || read("/console/requests").then(
      (value) => (setListed(value), setProblem(null)),
      setProblem,
    );
    refresh();
    const timer = setInterval(refresh, REFRESH_MS);
    return () => clearInterval(timer);
  }, []);
  return { listed, problem };
}

export function Requests() {
  const { listed, problem } = useRequests();
  const [isAll, setIsAll] = useState(false);
  const rows = listed?.requests.filter((request) => isAll || request.model || isError(request)) ?? [];
  const isAbsent = problem instanceof ApiError && problem.status === 404;
  return html`<h1>Requests</h1><${Find} id="" />
    ${problem && html`<p class="error" role="alert">${isAbsent ? "This address does not list requests: see the admin port." : problem.message}</p>`}
    ${listed?.kept === 0 && html`<p class="note">No requests are kept. Start the server with <code>--recent-requests 1000</code> to see here where their time goes.</p>`}
    ${listed?.kept > 0 && html`<label class="inline"><input type="checkbox" checked=${isAll} onChange=${(e) => setIsAll(e.target.checked)} />
        also requests without a model</label>
      <div class="card scroll"><table class="models"><thead><tr><th scope="col">time</th><th scope="col">id</th><th scope="col">model</th><th scope="col">request</th>
        <th scope="col">status</th><th scope="col">queue</th><th scope="col">compute</th><th scope="col">total</th></tr></thead>
      <tbody>${rows.map((request) => html`<tr key=${request.id + request.time}><td>${request.time.slice(11, 23)}</td>
        <td><a href=${address(request.id)}><code>${request.id}</code></a></td><td>${request.model || "–"}</td><td class="reason">${request.method} ${request.path}</td>
        <td><${Status} request=${request} /></td><td class="number">${milliseconds(request.queue_ms)}</td><td class="number">${milliseconds(request.compute_ms)}</td>
        <td class="number">${milliseconds(request.total_ms)}</td></tr>`)}</tbody></table></div>
      ${rows.length === 0 && html`<p class="note">None yet.</p>`}`}`;
}
