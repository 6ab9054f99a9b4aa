// One model: a chat or a form to try it, code that calls it, and its signature.
import { aboutPath, afterRequests, modelPath, read } from "./api.js";
import { Guarded, html, lazy, Problem, useEffect, useState } from "./html.js";
import { duration, kindGroup, kindName, platformName, plural } from "./words.js";

const Chat = lazy(() => import("./chat.js"), "Chat");
const Graph = lazy(() => import("./graph.js"), "Graph");
const Layers = lazy(() => import("./layers.js"), "Layers");
const Simulator = lazy(() => import("./simulator.js"), "Simulator");
const Snippets = lazy(() => import("./snippets.js"), "Snippets");
const TryIt = lazy(() => import("./try_it.js"), "TryIt");

// Return the shapes of the example that a model answers, by input, also if its values are too many for the document.
function exampleShapes(api) {
  const items = api.components.schemas.ModelInferRequest?.properties.inputs.items;
  const tensors = items?.anyOf ?? [items];
  return Object.fromEntries(tensors.filter((t) => t?.title).map((t) => [t.title, t.properties.shape.examples?.[0]]));
}

const readStatistics = (name, version) =>
  read(`${modelPath(name, version)}/stats`).then((found) => found.model_stats?.[0], () => null);

// Return the description of a model and what it supports, by its OpenAPI document and by UM-Bridge.
async function describe(name, version) {
  const path = modelPath(name, version);
  const [metadata, api, about] = await Promise.all([read(path), read(`${path}/openapi.json`), read(aboutPath(name, version))]);
  const operation = (suffix) => Object.entries(api.paths).find(([p]) => p.endsWith(suffix))?.[1].post;
  const infer = operation("/infer");
  const support = version
    ? {}
    : await read("/ModelInfo", { method: "POST", body: { name } }).then(
        (info) => info?.support ?? {},
        () => ({}),
      );
  return {
    metadata,
    support,
    kind: about.kind,
    description: about.description,
    labels: about.labels,
    outputs: about.outputs,
    pictures: about.pictures,
    examples: about.examples,
    hasLayers: about.has_layers,
    example: infer?.requestBody.content["application/json"].example ?? null,
    shapes: exampleShapes(api),
    canInfer: infer !== undefined,
    canGenerate: operation("/generate") !== undefined,
    statistics: await readStatistics(name, version),
  };
}

function Tensors({ title, tensors }) {
  if (!tensors?.length) return html`<p>${title}: not declared</p>`;
  return html`<div class="scroll"><table><caption>${title}</caption>
    <thead><tr><th scope="col">name</th><th scope="col">datatype</th><th scope="col">shape</th></tr></thead>
    <tbody>${tensors.map(
      (t) => html`<tr><td><code>${t.name}</code></td><td>${t.datatype}</td>
        <td>${t.parameters?.any_rank ? "any" : `[${t.shape.join(", ")}]`}</td></tr>`,
    )}</tbody></table></div>`;
}

const DERIVATIVES = { Gradient: "gradient", ApplyJacobian: "Jacobian", ApplyHessian: "Hessian" };

// How often the model was called, in words; "" if this is not known.
function useOf(statistics) {
  const { success, fail } = statistics?.inference_stats ?? {};
  if (!success) return "";
  const [count, failed] = [Number(success.count), Number(fail?.count ?? 0)];
  if (count + failed === 0) return "no requests yet";
  const mean = count > 0 ? `, ${duration(Number(success.ns) / count / 1e6)} on average` : "";
  return `${plural(count + failed, "request")}${failed > 0 ? ` (${failed} failed or stopped)` : ""}${mean}`;
}

function Facts({ model, name, version }) {
  const { metadata, support } = model;
  const [statistics, setStatistics] = useState(model.statistics);
  useEffect(() => afterRequests(() => readStatistics(name, version).then(setStatistics)), [name, version]);
  const sources = Object.entries(metadata.details?.derivatives ?? {});
  const derivatives = Object.entries(DERIVATIVES).filter(([key]) => support[key]).map(([key, label]) => {
    const source = sources.find(([ability]) => ability.replaceAll("_", "").startsWith(key.toLowerCase()))?.[1];
    return source ? `${label} (${source})` : label;
  });
  const facts = [
    platformName(metadata.platform),
    !version && metadata.versions?.length > 1 && `versions ${metadata.versions.join(", ")}`,
    derivatives.length > 0 && `with ${derivatives.join(", ")}`,
    useOf(statistics),
  ].filter(Boolean);
  return html`<p class="summary">${facts.join(" · ")}</p>`;
}

const isWide = () => matchMedia("(min-width: 45rem)").matches;

function Signature({ metadata }) {
  return html`<div class="columns"><${Tensors} title="Inputs" tensors=${metadata.inputs} /><${Tensors} title="Outputs" tensors=${metadata.outputs} /></div>`;
}

function tabsOf(model, name, version) {
  const simulator = model.support.Evaluate && ["Simulator", html`<${Simulator} name=${name} support=${model.support} metadata=${model.metadata} />`];
  return [
    model.kind === "simulator" && simulator,
    model.canGenerate && ["Chat", html`<${Chat} name=${name} details=${model.metadata.details ?? {}} />`],
    model.canInfer && ["Try it", html`<${TryIt} name=${name} version=${version} model=${model} />`],
    model.kind !== "simulator" && simulator,
    model.metadata.details?.graph?.edges && ["Graph", html`<${Graph} graph=${model.metadata.details.graph} name=${name} />`],
    model.hasLayers && ["Layers", html`<${Layers} name=${name} version=${version} />`],
    ["Code", html`<${Snippets} name=${name} version=${version} model=${model} />`],
    // Not below a chat, which fills the window.
    model.canGenerate && ["Signature", html`<${Signature} metadata=${model.metadata} />`],
  ].filter(Boolean);
}

export function ModelView({ name, version, server }) {
  const [model, setModel] = useState(null);
  const [problem, setProblem] = useState("");
  const [chosen, setChosen] = useState(0);
  const load = () => describe(name, version).then((found) => (setModel(found), setProblem("")), (error) => setProblem(error.message));
  useEffect(() => void load(), [name, version]);

  if (problem) return html`<h1>${name}</h1><${Problem} message=${problem} onRetry=${load} />`;
  if (!model) return html`<h1>${name}</h1><p class="note">Loading …</p>`;
  const tabs = tabsOf(model, name, version);
  const move = (event) => {
    const last = tabs.length - 1;
    const next = { ArrowRight: chosen === last ? 0 : chosen + 1, ArrowLeft: chosen === 0 ? last : chosen - 1, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    setChosen(next);
    event.currentTarget.children[next].focus();
  };
  return html`<div class="page-title"><h1>${name} ${version && html`<small>version ${version}</small>`}</h1>
      <span class=${`badge ${kindGroup(model.kind)}`}>${kindName(model.kind)}</span></div>
    ${model.description && html`<p class="lead">${model.description}</p>`}
    <${Facts} model=${model} name=${name} version=${version} />
    <div role="tablist" aria-label="Use the model" onKeyDown=${move}>${tabs.map(
      ([title], i) => html`<button role="tab" id=${`tab-${i}`} aria-selected=${i === chosen} aria-controls="panel"
        tabindex=${i === chosen ? 0 : -1} onClick=${() => setChosen(i)}>${title}</button>`,
    )}</div>
    <section role="tabpanel" id="panel" aria-labelledby=${`tab-${chosen}`} class="card"><${Guarded} key=${chosen}>${tabs[chosen][1]}</${Guarded}></section>
    ${!model.canGenerate && html`<details class="card signature" open=${isWide()}><summary><h2>Signature</h2></summary>
      <${Signature} metadata=${model.metadata} /></details>`}`;
}
