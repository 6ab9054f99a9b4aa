// The list of models, with their states and the actions of model control.
import { ApiError, call, read, storedKey } from "./api.js";
import { html, useEffect, useState } from "./html.js";

const REFRESH_MS = 3000;

const isDenied = (error) => error instanceof ApiError && error.status !== 0;
const denied = new Set(); // paths that were denied, each with the key: they are not asked for again

// Return what a path answers, null if this caller may not use it.
async function readIfAllowed(path, options) {
  const asked = `${path} ${storedKey()}`;
  if (denied.has(asked)) return null;
  try {
    return await read(path, options);
  } catch (error) {
    if (!isDenied(error)) throw error;
    if (error.status === 401 || error.status === 403 || error.status === 404) denied.add(asked);
    return null;
  }
}

// Return the models of the repository if this caller may control it, else those that are served with their states if it
// may read these, else the names of those that it may use.
async function listModels() {
  const status = await readIfAllowed("/v2/repository/status");
  if (status?.may_control) {
    const models = await readIfAllowed("/v2/repository/index", { method: "POST", body: {} });
    if (models) return { canControl: true, models };
  }
  if (status) return { canControl: false, models: status.models };
  const { models } = await read("/v2/models");
  return { canControl: false, models: models.map((name) => ({ name, version: "", state: "", reason: "" })) };
}

export function State({ state }) {
  const kind = { READY: "good", UNAVAILABLE: "bad" }[state] ?? "waiting";
  return state ? html`<span class=${`state ${kind}`}>${state.toLowerCase()}</span>` : "–";
}

function Control({ model, onDone, onError }) {
  const [busy, setBusy] = useState("");
  const run = (action) => async () => {
    setBusy(action);
    try {
      const path = `/v2/repository/models/${encodeURIComponent(model.name)}/${action}`;
      const parameters = model.version && action === "unload" ? { parameters: { version: model.version } } : {};
      await call(path, { method: "POST", body: parameters });
      onError("");
    } catch (error) {
      onError(`${action} ${model.name}: ${error.message}`);
    }
    setBusy("");
    onDone();
  };
  const loaded = model.state === "READY";
  const load = loaded ? "Reload" : "Load";
  return html`<button disabled=${busy !== ""} onClick=${run("load")} aria-label=${`${load} ${model.name}`}>${load}</button>
    <button disabled=${busy !== "" || !loaded} onClick=${run("unload")} aria-label=${`Unload ${model.name}`}>Unload</button>
    ${busy && html`<span role="status">${busy}ing …</span>`}`;
}

export function Models() {
  const [listed, setListed] = useState(null);
  const [problem, setProblem] = useState("");
  const [failure, setFailure] = useState("");

  async function refresh() {
    try {
      setListed(await listModels());
      setProblem("");
    } catch (error) {
      setProblem(error.message);
    }
  }
  useEffect(() => {
    refresh();
    const timer = setInterval(() => document.hidden || refresh(), REFRESH_MS);
    return () => clearInterval(timer);
  }, []);

  if (!listed) return problem ? html`<p class="error" role="alert">${problem}</p>` : html`<p class="note">Loading …</p>`;
  const { models, canControl } = listed;
  const address = (m) => `#/models/${encodeURIComponent(m.name)}${m.version ? `/${encodeURIComponent(m.version)}` : ""}`;
  return html`<h1>Models</h1>
    ${(problem || failure) && html`<p class="error" role="alert">${problem || failure}</p>`}
    ${models.length === 0 && html`<p class="note">No models. Serve some: <code>dragoman serve model.onnx</code></p>`}
    <div class="card scroll"><table class="models">
      <thead><tr><th scope="col">name</th><th scope="col">version</th><th scope="col">state</th><th scope="col">reason</th>${canControl && html`<th scope="col">control</th>`}</tr></thead>
      <tbody>${models.map(
        (m) => html`<tr key=${`${m.name}/${m.version}`}>
          <td><a href=${address(m)}>${m.name}</a></td>
          <td>${m.version || "–"}</td>
          <td><${State} state=${m.state} /></td>
          <td class="reason">${m.reason}</td>
          ${canControl && html`<td class="control"><${Control} model=${m} onDone=${refresh} onError=${setFailure} /></td>`}
        </tr>`,
      )}</tbody>
    </table></div>`;
}
