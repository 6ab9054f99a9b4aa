// What the server does now: requests, latencies, queue, batches, tokens, workers and errors, from its metrics.
import { isDenial, readIfAllowed, send } from "./api.js";
import { html, useEffect, useState } from "./html.js";
import { buckets, increase, parseMetrics, quantile, select, sum } from "./metrics.js";
import { Plot, format } from "./plot.js";

const PERIOD_MS = 2000;
const KEPT = 150; // five minutes
const DURATION = "dragoman_call_duration_seconds";

// What is asked for; all metrics of a large server are many.
const NAMES = ["requests_total", "call_duration_seconds", "calls_total", "calls_in_flight", "queued_calls", "batch_rows", "model_ready", "rejected_total",
  "access_denied_total", "worker_restarts_total", "text_queue_size", "text_batch_size", "text_generated_tokens"].map((name) => `dragoman_${name}`);
const ASKED = [...NAMES, "process_cpu_seconds_total", "process_resident_memory_bytes"].map((name) => `name[]=${name}`).join("&");
const MAX_MODELS = 50; // rows

// The pages and what they ask for are not requests of clients.
const isClient = ({ protocol }) => !["metrics", "openapi"].includes(protocol);
// Statuses of HTTP are numbers, those of gRPC names.
const isError = ({ status, protocol }) =>
  isClient({ protocol }) && (/^\d+$/.test(status) ? Number(status) >= 400 : status !== "OK");

function latency(q, before, after, keep = () => true) {
  const succeeded = (labels) => labels.outcome === "ok" && keep(labels);
  const found = quantile(q, buckets(before, DURATION, succeeded), buckets(after, DURATION, succeeded));
  return found === null ? null : found * 1000;
}

function mean(before, after, name) {
  const count = increase(before, after, `${name}_count`);
  return count > 0 ? increase(before, after, `${name}_sum`) / count : null;
}

function point(before, after) {
  const [old, now] = [before.samples, after.samples];
  const seconds = after.at - before.at;
  const rate = (name, keep) => increase(old, now, name, keep) / seconds;
  return {
    at: after.at,
    requests: rate("dragoman_requests_total", isClient),
    errors: rate("dragoman_requests_total", isError),
    p50: latency(0.5, old, now),
    p90: latency(0.9, old, now),
    p99: latency(0.99, old, now),
    inFlight: sum(now, "dragoman_calls_in_flight"),
    queued: sum(now, "dragoman_queued_calls") + sum(now, "dragoman_text_queue_size"),
    rows: mean(old, now, "dragoman_batch_rows"),
    sequences: sum(now, "dragoman_text_batch_size"),
    tokens: rate("dragoman_text_generated_tokens_sum"),
    cpu: rate("process_cpu_seconds_total"),
    memory: sum(now, "process_resident_memory_bytes") / 2 ** 20,
  };
}

function useHistory() {
  const [history, setHistory] = useState({ points: [], before: null, last: null });
  const [problem, setProblem] = useState("");
  useEffect(() => {
    let [last, isDenied] = [null, false];
    const scrape = async () => {
      if (document.hidden || isDenied) return;
      try {
        const response = await send(`/metrics?${ASKED}`);
        const next = { at: Date.now() / 1000, samples: parseMetrics(await response.text()) };
        const before = last;
        last = next;
        setProblem("");
        setHistory(({ points }) => ({ last: next, before, points: before ? [...points, point(before, next)].slice(-KEPT) : points }));
      } catch (error) {
        isDenied = isDenial(error);
        setProblem(`Metrics: ${error.message}`);
      }
    };
    scrape();
    const soon = setTimeout(scrape, PERIOD_MS / 4); // a rate needs two
    const timer = setInterval(scrape, PERIOD_MS);
    return () => (clearTimeout(soon), clearInterval(timer));
  }, []);
  return { ...history, problem };
}

function useStatus() {
  const [models, setModels] = useState([]);
  useEffect(() => {
    const refresh = () => document.hidden || readIfAllowed("/v2/repository/status").then((found) => setModels(found?.models ?? []), () => setModels([]));
    refresh();
    const timer = setInterval(refresh, PERIOD_MS);
    return () => clearInterval(timer);
  }, []);
  return models;
}

const modelKey = ({ model, version }) => `${model}/${version}`;

function byModel(samples) {
  const found = new Map();
  for (const sample of samples) {
    if (sample.labels.model === undefined) continue;
    const key = modelKey(sample.labels);
    (found.get(key) ?? found.set(key, []).get(key)).push(sample);
  }
  return found;
}

// The calls of each model since the last scrape, and what they wait for.
function ModelTable({ before, last }) {
  const [earlier, later] = [byModel(before.samples), byModel(last.samples)];
  const rows = select(last.samples, "dragoman_model_ready").map(({ labels }) => {
    const key = modelKey(labels);
    const [old, now] = [earlier.get(key) ?? [], later.get(key)];
    return {
      key, model: labels.model, version: labels.version,
      calls: increase(old, now, "dragoman_calls_total") / (last.at - before.at),
      p50: latency(0.5, old, now),
      p99: latency(0.99, old, now),
      inFlight: sum(now, "dragoman_calls_in_flight"),
      queued: sum(now, "dragoman_queued_calls") + sum(now, "dragoman_text_queue_size"),
    };
  });
  const time = (value) => (value === null ? "–" : `${format(value)} ms`);
  return html`<div class="scroll"><table class="models"><caption>Models in the last two seconds</caption>
    <thead><tr>${["model", "calls per second", "median", "99th percentile", "in flight", "in the queue"].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
    <tbody>${rows.sort((a, b) => b.calls - a.calls).slice(0, MAX_MODELS).map((row) => html`<tr key=${row.key}><td>${row.model} ${row.version && `version ${row.version}`}</td><td>${format(row.calls)}</td>
      <td>${time(row.p50)}</td><td>${time(row.p99)}</td><td>${row.inFlight}</td><td>${row.queued}</td></tr>`)}</tbody></table></div>
    ${rows.length > MAX_MODELS && html`<p class="note">${rows.length - MAX_MODELS} more models, which had fewer calls</p>`}`;
}

function Workers({ models }) {
  const rows = models.flatMap((model) => (model.workers ?? []).map((worker) => ({ model: model.name, version: model.version, ...worker })));
  if (rows.length === 0) return html`<p class="note">No worker processes: models run in the process of the server.</p>`;
  return html`<div class="scroll"><table class="models"><caption>Workers</caption>
    <thead><tr>${["model", "process", "state", "calls", "mean time"].map((name) => html`<th scope="col">${name}</th>`)}</tr></thead>
    <tbody>${rows.map((w) => html`<tr><td>${w.model} ${w.version && `version ${w.version}`}</td><td>${[w.host, w.process].filter(Boolean).join(" ")}</td>
      <td>${w.state}${w.reason && `: ${w.reason}`}</td><td>${w.calls}</td><td>${w.mean_s ? `${format(1000 * w.mean_s)} ms` : "–"}</td></tr>`)}</tbody></table></div>`;
}

function Errors({ samples }) {
  const counted = (name, keep) => select(samples, name, keep).filter((s) => s.value > 0);
  const rows = [
    ...counted("dragoman_calls_total", ({ outcome }) => outcome !== "ok").map((s) => [s.labels.outcome, `calls of ${s.labels.model}`, s.value]),
    ...counted("dragoman_requests_total", isError).map((s) => [`status ${s.labels.status}`, s.labels.protocol, s.value]),
    ...counted("dragoman_rejected_total").map((s) => [`rejected: ${s.labels.reason.replaceAll("_", " ")}`, "server", s.value]),
    ...counted("dragoman_access_denied_total").map((s) => [`access denied: ${s.labels.reason}`, "server", s.value]),
    ...counted("dragoman_worker_restarts_total").map((s) => ["restart of a worker", s.labels.model, s.value]),
  ];
  if (rows.length === 0) return html`<p class="note">No errors, rejected requests or restarts since the start.</p>`;
  return html`<div class="scroll"><table class="models"><caption>Errors since the start</caption>
    <thead><tr><th scope="col">kind</th><th scope="col">where</th><th scope="col">number</th></tr></thead>
    <tbody>${rows.map(([kind, where, count]) => html`<tr><td>${kind}</td><td>${where}</td><td>${format(count)}</td></tr>`)}</tbody></table></div>`;
}

export function Live() {
  const { points, before, last, problem } = useHistory();
  const models = useStatus();
  const x = points.map((p) => p.at);
  const series = (key, label = "") => ({ label, values: points.map((p) => p[key]) });
  const has = (key) => points.some((p) => p[key] > 0);
  return html`<h1>Live</h1>
    ${problem && html`<p class="error" role="alert">${problem}</p>`}
    ${points.length === 0 && !problem && html`<p class="note">Collecting …</p>`}
    ${points.length > 0 && html`<div class="plots">
      <${Plot} title="Requests" unit="/s" time x=${x} series=${[series("requests", "all"), series("errors", "errors")]} />
      <${Plot} title="Latency" unit="ms" time x=${x} series=${[series("p50", "median"), series("p90", "90 %"), series("p99", "99 %")]} />
      <${Plot} title="Calls" time x=${x} series=${[series("inFlight", "in flight"), series("queued", "in the queue")]} />
      ${has("rows") && html`<${Plot} title="Rows of a batch" time x=${x} series=${[series("rows")]} />`}
      ${(has("tokens") || has("sequences")) && html`<${Plot} title="Tokens" unit="/s" time x=${x} series=${[series("tokens")]} />
        <${Plot} title="Sequences of a batch" time x=${x} series=${[series("sequences")]} />`}
      <${Plot} title="CPU of the server process" unit="cores" time x=${x} series=${[series("cpu")]} />
      <${Plot} title="Memory of the server process" unit="MiB" time x=${x} series=${[series("memory")]} />
    </div>`}
    ${points.length > 0 && html`<section class="card"><${ModelTable} before=${before} last=${last} /></section>
    <section class="card"><${Workers} models=${models} /></section>
    <section class="card"><${Errors} samples=${last.samples} /></section>`}`;
}
