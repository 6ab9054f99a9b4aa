// The start page: the models as cards, with their states, calls per second and the actions of model control.
import { call, read, readIfAllowed, sendIfAllowed, storedKey } from "./api.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { callsByModel } from "./metrics.js";
import { kindGroup, kindName, platformName, plural, rate } from "./words.js";

const REFRESH_MS = 3000;
const REFRESH_MS_PER_MODEL = 10; // a server of a thousand models is asked less often
const SHOWN = 48; // cards at first, and more each time the end of the page is near
const POINTS = 40; // of a spark line
const MIN_SEARCHED = 4;
const UNLOADED = "unloaded"; // the reason of a model that somebody has unloaded

const remembered = { text: "", kind: "" }; // while the tab is open, for the way back from a model

const entry = (name, { version, state, reason }) => ({ name, state, kind: "", description: "", versions: [{ version, state, reason }] });

// Return the models with what they say of themselves, and those that could be loaded if this caller may do that.
async function listModels() {
  const [{ models }, index] = await Promise.all([read("/console/models"), repositoryIndex().catch(() => null)]);
  const known = new Map(models.map((model) => [model.name, { ...model, versions: [...model.versions] }]));
  for (const found of index ?? []) {
    const model = known.get(found.name);
    if (!model) known.set(found.name, entry(found.name, found));
    else if (!model.versions.some(({ version }) => version === (found.version ?? ""))) model.versions.push(found);
  }
  return { models: [...known.values()].sort((a, b) => a.name.localeCompare(b.name)), canControl: index !== null };
}

const hasControl = new Map(); // by key, whether the server allows it at all: to others the index is an error

async function repositoryIndex() {
  const key = storedKey();
  if (!hasControl.has(key)) hasControl.set(key, (await readIfAllowed("/v2/repository/status"))?.may_control === true);
  return hasControl.get(key) ? readIfAllowed("/v2/repository/index", { method: "POST", body: {} }) : null;
}

function useModels() {
  const [listed, setListed] = useState(null);
  const [problem, setProblem] = useState("");
  const refresh = () => listModels().then((found) => (setListed(found), setProblem("")), (error) => setProblem(error.message));
  const count = listed?.models.length ?? 0;
  useEffect(() => void refresh(), []);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || refresh(), REFRESH_MS + count * REFRESH_MS_PER_MODEL);
    return () => clearInterval(timer);
  }, [count]);
  return { listed, problem, refresh };
}

// Calls per second of each model since the page was opened, as lists by name. Empty if this caller may not read metrics.
function useRates(count) {
  const [rates, setRates] = useState(new Map());
  useEffect(() => {
    if (count === 0) return undefined;
    let [last, isDenied] = [null, false];
    const scrape = async () => {
      if (document.hidden || isDenied) return;
      const response = await sendIfAllowed("/metrics?name[]=dragoman_calls_total").catch(() => undefined);
      isDenied = response === null;
      if (!response) return;
      const next = { at: performance.now(), calls: callsByModel(await response.text()) };
      const before = last;
      last = next;
      if (before) setRates((known) => addRates(known, before, next));
    };
    scrape();
    const timer = setInterval(scrape, REFRESH_MS + count * REFRESH_MS_PER_MODEL);
    return () => clearInterval(timer);
  }, [count]);
  return rates;
}

function addRates(known, before, next) {
  const seconds = (next.at - before.at) / 1000;
  return new Map([...next.calls].map(([name, calls]) => {
    const more = calls - (before.calls.get(name) ?? 0);
    return [name, [...(known.get(name) ?? []), (more < 0 ? calls : more) / seconds].slice(-POINTS)]; // a counter may start anew
  }));
}

function Spark({ values }) {
  const top = Math.max(...values) || 1;
  const points = values.map((value, i) => `${POINTS - values.length + i},${(19 - (17 * value) / top).toFixed(1)}`);
  return html`<svg class="spark" viewBox=${`0 0 ${POINTS - 1} 20`} preserveAspectRatio="none" aria-hidden="true"><polyline points=${points.join(" ")} /></svg>`;
}

function State({ state, reason = "" }) {
  if (reason === UNLOADED) return html`<span class="state note">not loaded</span>`;
  const kind = { READY: "good", UNAVAILABLE: "bad" }[state] ?? "waiting";
  return html`<span class=${`state ${kind}`}>${state.toLowerCase()}</span>`;
}

function Control({ name, version, state, onDone, onError }) {
  const [busy, setBusy] = useState("");
  const run = (action) => async () => {
    if (busy) return;
    setBusy(action);
    try {
      const path = `/v2/repository/models/${encodeURIComponent(name)}/${action}`;
      await call(path, { method: "POST", body: version && action === "unload" ? { parameters: { version } } : {} });
      onError("");
    } catch (error) {
      onError(`${action} ${name}: ${error.message}`);
    }
    setBusy("");
    onDone();
  };
  const isLoaded = state === "READY";
  const label = isLoaded ? "Reload" : "Load";
  const of = version ? `${name} version ${version}` : name;
  return html`<div class="control"><button class="small" aria-disabled=${busy !== ""} onClick=${run("load")} aria-label=${`${label} ${of}`}>${label}</button>
    <button class="small" aria-disabled=${busy !== ""} disabled=${!isLoaded} onClick=${run("unload")} aria-label=${`Unload ${of}`}>Unload</button>
    ${busy && html`<span role="status">${busy}ing …</span>`}</div>`;
}

// Buttons behind three dots; a click elsewhere and Escape close them.
function Menu({ label, children }) {
  const details = useRef(null);
  const [isOpen, setIsOpen] = useState(false);
  useEffect(() => {
    if (!isOpen) return undefined;
    const close = (event) => details.current.contains(event.target) || (details.current.open = false);
    const events = ["pointerdown", "focusin"];
    events.forEach((name) => document.addEventListener(name, close));
    return () => events.forEach((name) => document.removeEventListener(name, close));
  }, [isOpen]);
  const escape = (event) => {
    if (event.key !== "Escape") return;
    details.current.open = false;
    details.current.firstChild.focus();
  };
  return html`<details class="menu" ref=${details} onToggle=${(e) => setIsOpen(e.currentTarget.open)} onKeyDown=${escape}><summary aria-label=${label}><span aria-hidden="true">⋯</span></summary>
    <div>${children}</div></details>`;
}

const address = (name, version) => `#/models/${encodeURIComponent(name)}${version ? `/${encodeURIComponent(version)}` : ""}`;
const ACTIONS = { chat: "Chat", completion: "Write", simulator: "Explore" };

function Card({ model, rates, canControl, onDone, onError }) {
  const { name, state, kind, description, versions } = model;
  const reasons = versions.filter(({ reason }) => reason && reason !== UNLOADED);
  const now = rates?.at(-1);
  const control = (version, of) => html`<${Control} name=${name} version=${version} state=${of} onDone=${onDone} onError=${onError} />`;
  return html`<li class="card model">
    <div class="top"><h2><a href=${address(name)}>${name}</a></h2>
      ${kind && html`<span class=${`badge ${kindGroup(kind)}`}>${kindName(kind)}</span>`}
      ${canControl && versions.length === 1 && html`<${Menu} label=${`Control ${name}`}>${control(versions[0].version, versions[0].state)}</${Menu}>`}</div>
    <p class="description">${description || platformName(model.platform)}</p>
    ${versions.length > 1 && html`<ul class="versions">${versions.map(({ version, state: of, reason }) => html`<li key=${version}>
      <a href=${address(name, version)}>version ${version}</a> <${State} state=${of} reason=${reason} />
      ${canControl && html`<${Menu} label=${`Control ${name} version ${version}`}>${control(version, of)}</${Menu}>`}</li>`)}</ul>`}
    ${reasons.map(({ version, state: of, reason }) => html`<p key=${version} class=${of === "UNAVAILABLE" ? "reason error" : "reason note"}>
      ${versions.length > 1 && `version ${version}: `}${reason}</p>`)}
    <div class="foot"><${State} state=${state} reason=${versions.at(-1).reason} />
      ${now !== undefined && html`<span class="rate">${rate(now)}</span>${Math.max(...rates) > 0 && html`<${Spark} values=${rates} />`}`}
      ${state !== "UNAVAILABLE" && html`<span class="go" aria-hidden="true">${ACTIONS[kind] ?? "Try it"} →</span>`}</div>
  </li>`;
}

const isFailed = (model) => model.versions.some(({ state, reason }) => state === "UNAVAILABLE" && reason && reason !== UNLOADED);

function matches(model, text, kind) {
  if (kind === "failed" ? !isFailed(model) : kind && model.kind !== kind) return false;
  const searched = `${model.name} ${kindName(model.kind)} ${model.description} ${model.platform ?? ""}`.toLowerCase();
  return text.toLowerCase().split(/\s+/).every((word) => searched.includes(word));
}

function Filter({ models, filter, onFilter, found }) {
  const counts = new Map();
  models.forEach(({ kind }) => kind && counts.set(kind, (counts.get(kind) ?? 0) + 1));
  const kinds = [...counts].sort(([a, m], [b, n]) => n - m || a.localeCompare(b));
  const failed = models.filter(isFailed).length;
  const chip = (kind, label, count) => html`<button key=${kind} class="chip" aria-pressed=${filter.kind === kind}
    onClick=${() => onFilter({ kind: filter.kind === kind ? "" : kind })}>${label} <small>${count}</small></button>`;
  return html`<div class="filter" role="search">
    <input type="search" aria-label="Search models" placeholder="Search by name, kind or description" value=${filter.text}
      spellcheck=${false} onInput=${(e) => onFilter({ text: e.target.value })} />
    ${(kinds.length > 1 || failed > 0) && html`<div class="chips" role="group" aria-label="Kinds">
      ${kinds.length > 1 && kinds.map(([kind, count]) => chip(kind, kindName(kind), count))}
      ${failed > 0 && chip("failed", "failed", failed)}</div>`}
    <span class="visually-hidden" role="status">${plural(found, "model")} found</span></div>`;
}

// What to do with a server that has no models.
function Empty() {
  return html`<section class="card first-steps"><h2>No models yet</h2>
    <p>Start the server with a file, a folder or a Python function:</p>
    <pre class="code" tabindex="0">dragoman serve model.onnx${"\n"}dragoman serve models/${"\n"}dragoman serve functions.py:predict</pre>
    <p class="note"><code>dragoman init</code> writes a small project to start from.</p></section>`;
}

// Call a function when the element comes near the edge of the window.
function End({ onNear, children }) {
  const element = useRef(null);
  useEffect(() => {
    const observer = new IntersectionObserver((entries) => entries.some((e) => e.isIntersecting) && onNear(), { rootMargin: "600px" });
    observer.observe(element.current);
    return () => observer.disconnect();
  });
  return html`<p ref=${element}>${children}</p>`;
}

function summary(models) {
  const ready = models.filter(({ state }) => state === "READY").length;
  const failed = models.filter(isFailed).length;
  const others = models.length - ready - failed;
  return [plural(models.length, "model"), ready < models.length && `${ready} ready`, failed > 0 && `${failed} failed`, others > 0 && `${others} not loaded`]
    .filter(Boolean).join(", ");
}

export function Models() {
  const { listed, problem, refresh } = useModels();
  const [failure, setFailure] = useState("");
  const [filter, setFilter] = useState(remembered);
  const [shown, setShown] = useState(SHOWN);
  const rates = useRates(listed?.models.length ?? 0);
  if (!listed) return problem ? html`<p class="error" role="alert">${problem}</p>` : html`<h1>Models</h1><p class="note">Loading …</p>`;
  const { models, canControl } = listed;
  const change = (values) => (setFilter(Object.assign(remembered, values)), setFilter({ ...remembered }), setShown(SHOWN));
  const found = models.filter((model) => matches(model, filter.text, filter.kind));
  const more = found.length - shown;
  return html`<div class="page-title"><h1>Models</h1>${models.length > 0 && html`<span class="note">${summary(models)}</span>`}</div>
    ${(problem || failure) && html`<p class="error" role="alert">${problem || failure}</p>`}
    ${models.length === 0 && html`<${Empty} />`}
    ${models.length >= MIN_SEARCHED && html`<${Filter} models=${models} filter=${filter} onFilter=${change} found=${found.length} />`}
    <ul class="models">${found.slice(0, shown).map((model) => html`<${Card} key=${model.name} model=${model} rates=${rates.get(model.name)}
      canControl=${canControl} onDone=${refresh} onError=${setFailure} />`)}</ul>
    ${found.length === 0 && models.length > 0 && html`<p class="note">No model matches. <button class="small" onClick=${() => change({ text: "", kind: "" })}>Show all</button></p>`}
    ${more > 0 && html`<${End} onNear=${() => setShown(shown + SHOWN)}><button onClick=${() => setShown(shown + SHOWN)}>Show more</button> <span class="note">${more} more</span></${End}>`}`;
}
