// One model: its signature, a form to try it, and code that calls it.
import { modelPath, read } from "./api.js";
import { Chat } from "./chat.js";
import { Graph } from "./graph.js";
import { html, useEffect, useState } from "./html.js";
import { Simulator } from "./simulator.js";
import { Snippets } from "./snippets.js";
import { TryIt } from "./try_it.js";

// Return the shapes of the example that a model answers, by input, also if its values are too many for the document.
function exampleShapes(api) {
  const items = api.components.schemas.ModelInferRequest?.properties.inputs.items;
  const tensors = items?.anyOf ?? [items];
  return Object.fromEntries(tensors.filter((t) => t?.title).map((t) => [t.title, t.properties.shape.examples?.[0]]));
}

// Return the description of a model and what it supports, by its OpenAPI document and by UM-Bridge.
async function describe(name, version) {
  const path = modelPath(name, version);
  const [metadata, api] = await Promise.all([read(path), read(`${path}/openapi.json`)]);
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
    example: infer?.requestBody.content["application/json"].example ?? null,
    shapes: exampleShapes(api),
    canInfer: infer !== undefined,
    canGenerate: operation("/generate") !== undefined,
    statistics: await read(`${path}/stats`).then((found) => found.model_stats?.[0], () => null),
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

const ABILITIES = { Evaluate: "evaluate", Gradient: "gradient", ApplyJacobian: "Jacobian", ApplyHessian: "Hessian" };

function Facts({ model }) {
  const { metadata, support, statistics } = model;
  const abilities = [
    model.canInfer && "infer",
    model.canGenerate && "generate",
    ...Object.entries(ABILITIES).map(([key, label]) => support[key] && label),
  ].filter(Boolean);
  const derivatives = Object.entries(metadata.details?.derivatives ?? {});
  const success = statistics?.inference_stats?.success;
  const mean = success && Number(success.count) > 0 ? Number(success.ns) / Number(success.count) / 1e6 : null;
  return html`<dl class="facts">
    <dt>platform</dt><dd>${metadata.platform || "–"}</dd>
    ${metadata.versions?.length > 0 && html`<dt>versions</dt><dd>${metadata.versions.join(", ")}</dd>`}
    <dt>calls</dt><dd>${abilities.join(", ") || "–"}</dd>
    ${derivatives.length > 0 && html`<dt>derivatives</dt><dd>${derivatives.map(([k, v]) => `${k}: ${v}`).join(", ")}</dd>`}
    ${success && html`<dt>requests</dt><dd>${String(success.count)}${mean !== null && `, ${mean.toFixed(2)} ms on average`}</dd>`}
  </dl>`;
}

function tabsOf(model, name, version) {
  return [
    model.canGenerate && ["Chat", html`<${Chat} name=${name} hasTemplate=${model.metadata.details?.chat_template !== false} />`],
    model.canInfer && ["Try it", html`<${TryIt} name=${name} version=${version} model=${model} />`],
    model.support.Evaluate && ["Simulator", html`<${Simulator} name=${name} support=${model.support} metadata=${model.metadata} />`],
    model.metadata.details?.graph?.edges && ["Graph", html`<${Graph} graph=${model.metadata.details.graph} name=${name} />`],
    ["Code", html`<${Snippets} name=${name} version=${version} model=${model} />`],
  ].filter(Boolean);
}

export function ModelView({ name, version, server }) {
  const [model, setModel] = useState(null);
  const [problem, setProblem] = useState("");
  const [chosen, setChosen] = useState(0);
  useEffect(() => {
    describe(name, version).then(setModel, (error) => setProblem(error.message));
  }, [name, version]);

  if (problem) return html`<h1>${name}</h1><p class="error" role="alert">${problem}</p>`;
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
  return html`<h1>${name} ${version && html`<small>version ${version}</small>`}</h1>
    <section class="card columns">
      <${Facts} model=${model} />
      <${Tensors} title="Inputs" tensors=${model.metadata.inputs} />
      <${Tensors} title="Outputs" tensors=${model.metadata.outputs} />
    </section>
    <div role="tablist" aria-label="Use the model" onKeyDown=${move}>${tabs.map(
      ([title], i) => html`<button role="tab" id=${`tab-${i}`} aria-selected=${i === chosen} aria-controls="panel"
        tabindex=${i === chosen ? 0 : -1} onClick=${() => setChosen(i)}>${title}</button>`,
    )}</div>
    <section role="tabpanel" id="panel" aria-labelledby=${`tab-${chosen}`} class="card">${tabs[chosen][1]}</section>`;
}
