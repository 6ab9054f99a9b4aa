// What the server does now: requests, latencies, errors and memory, from its Prometheus metrics.
import { send } from "./api.js";
import { html, useEffect, useState } from "./html.js";
import { Plot, format } from "./plot.js";

const PERIOD_MS = 2000;
const KEPT = 150; // five minutes
const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

export function parseMetrics(text) {
  const samples = [];
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : SAMPLE.exec(line);
    if (found) {
      const labels = Object.fromEntries([...(found[2] ?? "").matchAll(LABEL)].map(([, k, v]) => [k, v]));
      samples.push({ name: found[1], labels, value: Number(found[3].replace("Inf", "Infinity")) });
    }
  }
  return samples;
}

// Statuses of HTTP are numbers, those of gRPC names.
const isError = ({ status }) => (/^\d+$/.test(status) ? Number(status) >= 400 : status !== "OK");

const select = (samples, name) => samples.filter((s) => s.name === name);
const sum = (samples, name, keep = () => true) =>
  select(samples, name).reduce((total, s) => (keep(s.labels) ? total + s.value : total), 0);

function buckets(samples, name, keep) {
  const found = new Map();
  for (const s of select(samples, `${name}_bucket`)) {
    if (keep(s.labels)) found.set(Number(s.labels.le.replace("+Inf", "Infinity")), (found.get(Number(s.labels.le.replace("+Inf", "Infinity"))) ?? 0) + s.value);
  }
  return [...found].sort(([a], [b]) => a - b);
}

// The quantile of what a histogram counted between two scrapes, linear within a bucket, as Prometheus computes it.
export function quantile(q, before, after) {
  const earlier = new Map(before);
  const counts = after.map(([bound, count]) => [bound, count - (earlier.get(bound) ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  const rank = q * total;
  let [lower, below] = [0, 0];
  for (const [bound, count] of counts) {
    if (count >= rank) return bound === Infinity ? lower : lower + ((bound - lower) * (rank - below)) / Math.max(count - below, 1);
    [lower, below] = [bound, count];
  }
  return null;
}

function point(before, after) {
  const seconds = after.at - before.at;
  const rate = (name, keep) => Math.max(0, sum(after.samples, name, keep) - sum(before.samples, name, keep)) / seconds;
  const all = () => true;
  const latency = (q) => {
    const name = "dragoman_call_duration_seconds";
    const found = quantile(q, buckets(before.samples, name, all), buckets(after.samples, name, all));
    return found === null ? null : found * 1000;
  };
  return {
    at: after.at,
    requests: rate("dragoman_requests_total"),
    errors: rate("dragoman_requests_total", isError),
    p50: latency(0.5),
    p99: latency(0.99),
    inFlight: sum(after.samples, "dragoman_calls_in_flight"),
    tokens: rate("dragoman_text_generated_tokens_sum"),
    cpu: rate("process_cpu_seconds_total"),
    memory: sum(after.samples, "process_resident_memory_bytes") / 2 ** 20,
  };
}

function useHistory() {
  const [history, setHistory] = useState({ points: [], last: null });
  const [problem, setProblem] = useState("");
  useEffect(() => {
    let last = null;
    const scrape = async () => {
      if (document.hidden) return;
      try {
        const response = await send("/metrics");
        const next = { at: Date.now() / 1000, samples: parseMetrics(await response.text()) };
        const previous = last;
        last = next;
        setProblem("");
        setHistory(({ points }) => ({ last: next, points: previous ? [...points, point(previous, next)].slice(-KEPT) : points }));
      } catch (error) {
        setProblem(error.message);
      }
    };
    scrape();
    const timer = setInterval(scrape, PERIOD_MS);
    return () => clearInterval(timer);
  }, []);
  return { ...history, problem };
}

function Counts({ samples }) {
  const failed = select(samples, "dragoman_requests_total").filter((s) => isError(s.labels) && s.value > 0);
  const rejected = select(samples, "dragoman_rejected_total").filter((s) => s.value > 0);
  const restarts = select(samples, "dragoman_worker_restarts_total").filter((s) => s.value > 0);
  const rows = [...failed, ...rejected, ...restarts];
  if (rows.length === 0) return html`<p class="note">No errors, rejected requests or restarts since the start.</p>`;
  return html`<table><caption>Errors since the start</caption><tbody>${rows.map(
    (s) => html`<tr><td>${s.name.replace(/^dragoman_|_total$/g, "").replaceAll("_", " ")}</td>
      <td>${Object.entries(s.labels).map(([k, v]) => `${k} ${v}`).join(", ")}</td><td class="number">${format(s.value)}</td></tr>`,
  )}</tbody></table>`;
}

export function Live() {
  const { points, last, problem } = useHistory();
  const x = points.map((p) => p.at);
  const series = (key, label = "") => ({ label, values: points.map((p) => p[key]) });
  const hasTokens = points.some((p) => p.tokens > 0);
  return html`<h1>Live</h1>
    ${problem && html`<p class="error" role="alert">Metrics: ${problem}</p>`}
    ${points.length === 0 && !problem && html`<p class="note">Collecting …</p>`}
    ${points.length > 0 && html`<div class="plots">
      <${Plot} title="Requests" unit="/s" time x=${x} series=${[series("requests", "all"), series("errors", "errors")]} />
      <${Plot} title="Latency" unit="ms" time x=${x} series=${[series("p50", "p50"), series("p99", "p99")]} />
      <${Plot} title="Calls in flight" time x=${x} series=${[series("inFlight")]} />
      ${hasTokens && html`<${Plot} title="Tokens" unit="/s" time x=${x} series=${[series("tokens")]} />`}
      <${Plot} title="CPU" unit="cores" time x=${x} series=${[series("cpu")]} />
      <${Plot} title="Memory" unit="MiB" time x=${x} series=${[series("memory")]} />
    </div>`}
    ${last && html`<section class="card"><${Counts} samples=${last.samples} /></section>`}`;
}
