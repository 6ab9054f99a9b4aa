// The graph in the file of a model: a picture of which only the visible part is drawn, and the details of one node.
import { aboutPath, read } from "./api.js";
import { curve } from "./graph.js";
import { html, Problem, useEffect, useMemo, useRef, useState } from "./html.js";
import { plural } from "./words.js";

const CHARACTER = 7.6;
const HEIGHT = 40;
const MARGIN = 24;
const LISTED = 40;
const [MIN_ZOOM, MAX_ZOOM] = [0.15, 2];
const GROUPS = [
  ["weights", /^(Conv|MatMul|Gemm|QLinear|Attention|LSTM|GRU|RNN|Einsum|TreeEnsemble|Linear|SVM|DynamicQuantizeLSTM)/],
  ["activation", /^(Relu|.*Relu|Sigmoid|Tanh|Softmax|LogSoftmax|Gelu|Erf|Elu|Selu|HardSigmoid|HardSwish|Clip|Softplus|Mish)$/],
  ["norm", /Normalization|Normalizer|Pool|^Reduce|^LRN|Scaler|QuantizeLinear/],
  ["shape", /^(Reshape|Transpose|Concat|Split|Slice|Gather|Squeeze|Unsqueeze|Flatten|Shape|Expand|Pad|Cast|Resize|Tile|Identity|Range|Where|Scatter)/],
];
const groupOf = (op) => GROUPS.find(([, pattern]) => pattern.test(op))?.[0] ?? "other";
const shapeText = (tensor) => (tensor?.[1] ? `[${tensor[1].map((n) => (n === "" ? "?" : n)).join(", ")}]` : "");
const shorten = (text, length) => (text.length > length ? `${text.slice(0, length - 1)}…` : text);

// Nodes and edges of a file for the layout. Constants are weights, not nodes.
function graphOf(found) {
  const weights = new Map(Object.entries(found.weights));
  const nodes = [];
  const producers = new Map();
  const add = (node) => {
    const shape = shapeText(found.tensors[node.outputs[0]]) || shapeText(weights.get(node.inputs.find((name) => weights.has(name))));
    const [title, line] = [shorten(node.op, 24), shorten(node.kind === "node" ? shape : node.line, 30)];
    const key = `n${nodes.length}`;
    nodes.push({ ...node, key, title, line, group: groupOf(node.op), width: Math.max(title.length * 1.1, line.length, 6) * CHARACTER + 20, height: HEIGHT });
    node.outputs.forEach((name) => name && producers.set(name, key));
  };
  const end = (kind) => (name) => ({ kind, op: name, name: "", line: [found.tensors[name]?.[0], shapeText(found.tensors[name])].join(" ").trim(), attributes: {},
    inputs: kind === "output" ? [name] : [], outputs: kind === "input" ? [name] : [] });
  found.inputs.filter((name) => !weights.has(name)).map(end("input")).forEach(add);
  for (const node of found.nodes) {
    if (node.op === "Constant") weights.set(node.outputs[0], ["constant", null]);
    else add({ ...node, kind: "node" });
  }
  found.outputs.map(end("output")).forEach(add);
  const edges = nodes.flatMap(({ key, inputs }) => [...new Set(inputs.map((name) => producers.get(name)))].filter((from) => from && from !== key).map((from) => ({ from, to: key })));
  const consumers = new Map();
  edges.forEach(({ from, to }) => consumers.set(from, [...(consumers.get(from) ?? []), to]));
  return { ...found, nodes, edges, weights, producers, consumers, byKey: new Map(nodes.map((node) => [node.key, node])) };
}

function useLayout(graph) {
  const [placed, setPlaced] = useState(null);
  useEffect(() => {
    if (!graph) return undefined;
    const worker = new Worker(new URL("./layers_worker.js", import.meta.url), { type: "module" });
    const fed = new Set(graph.edges.map(({ to }) => to)); // a node without inputs, such as a constant that is cast, stands above its use
    worker.onmessage = ({ data }) => setPlaced(data);
    worker.postMessage({ nodes: graph.nodes.map(({ key, kind, width, height }) => ({ key, width, height, isSource: kind === "node" && !fed.has(key) })), edges: graph.edges });
    return () => worker.terminate();
  }, [graph]);
  return placed;
}

function Picture({ graph, placed, chosen, onChoose, name }) {
  const scroller = useRef(null);
  const [view, setView] = useState(null);
  const [zoom, setZoom] = useState(0);
  const look = () => {
    const { scrollLeft, scrollTop, clientWidth, clientHeight } = scroller.current;
    setView({ left: scrollLeft, top: scrollTop, width: clientWidth, height: clientHeight });
  };
  useEffect(() => {
    const observer = new ResizeObserver(look);
    observer.observe(scroller.current);
    const { clientWidth } = scroller.current;
    setZoom(Math.min(1, Math.max(0.8, clientWidth / (placed.width + 2 * MARGIN))));
    return () => observer.disconnect();
  }, []);
  const [width, height] = [placed.width + 2 * MARGIN, placed.height + 2 * MARGIN];
  const center = (x, y) => scroller.current.scrollTo((x + MARGIN) * zoom - scroller.current.clientWidth / 2, (y + MARGIN) * zoom - scroller.current.clientHeight / 3);
  useEffect(() => {
    const box = placed.boxes.get(chosen ?? graph.nodes[0].key);
    if (zoom && box && (chosen || !view?.top)) center(box.x, box.y), look();
  }, [chosen, zoom]);
  const change = (factor) => setZoom((now) => Math.min(MAX_ZOOM, Math.max(MIN_ZOOM, now * factor)));
  const fit = () => setZoom(Math.max(MIN_ZOOM, Math.min(1, view.width / width, view.height / height)));
  const wheel = (event) => (event.ctrlKey || event.metaKey) && (event.preventDefault(), change(event.deltaY > 0 ? 1 / 1.2 : 1.2));

  let drawing = null;
  if (view && zoom) {
    // The part of the graph that is visible; a small one stands in the middle.
    const [w, h] = [view.width / zoom, view.height / zoom];
    const x = (w > width ? (width - w) / 2 : view.left / zoom) - MARGIN;
    const y = view.top / zoom - MARGIN;
    const isVisible = (left, top, right, bottom) => right > x && left < x + w && bottom > y && top < y + h;
    const boxes = graph.nodes.filter(({ key }) => {
      const box = placed.boxes.get(key);
      return isVisible(box.x - box.width / 2, box.y, box.x + box.width / 2, box.y + box.height);
    });
    const paths = placed.paths.filter((points) => {
      const xs = points.map(([px]) => px);
      return isVisible(Math.min(...xs) - 1, points[0][1], Math.max(...xs) + 1, points.at(-1)[1]);
    });
    drawing = html`<svg class="layers" viewBox=${[x, y, w, h].map((n) => n.toFixed(1)).join(" ")} width=${view.width} height=${view.height}
      role="img" aria-label=${`Graph of ${name}: ${plural(graph.nodes.length, "node")}; search and the list of operators name them`}>
      ${paths.map((points) => html`<path class="edge" d=${curve(points)} />`)}
      ${boxes.map(({ key, kind, title, line, group }) => {
        const { x: cx, y: top, width: bw, height: bh } = placed.boxes.get(key);
        return html`<g key=${key} class=${`${kind} ${group}${key === chosen ? " chosen" : ""}`} onClick=${() => onChoose(key)}>
          <rect x=${cx - bw / 2} y=${top} width=${bw} height=${bh} rx=${kind === "node" ? 6 : 20} />
          <text x=${cx} y=${top + (line ? 17 : 25)}>${title}</text>${line && html`<text class="line" x=${cx} y=${top + 32}>${line}</text>`}</g>`;
      })}</svg>`;
  }
  return html`<div class="layers-picture">
    <div class="layers-view" ref=${scroller} onScroll=${look} onWheel=${wheel} tabindex="0" role="region" aria-label="Picture of the layers">
      <div class="layers-space" style=${{ width: `${width * zoom}px`, height: `${height * zoom}px` }}>${drawing}</div></div>
    <div class="layers-zoom"><button aria-label="Zoom in" onClick=${() => change(1.3)}>+</button><button aria-label="Zoom out" onClick=${() => change(1 / 1.3)}>−</button>
      <button onClick=${fit}>Fit</button></div></div>`;
}

const valueText = (value) =>
  value === null ? "–" : value.operators ? `graph ${value.graph}: ${Object.entries(value.operators).map(([op, n]) => `${n} ${op}`).join(", ")}` : Array.isArray(value) ? `[${value.join(", ")}]` : String(value);

// The details of a node, with buttons that lead to those before and after it.
function Node({ graph, node, onChoose }) {
  const link = (key) => html`<button class="link" onClick=${() => onChoose(key)}>${graph.byKey.get(key).op}</button>`;
  const tensor = (name) => {
    const weight = graph.weights.get(name);
    const [datatype, shape] = weight ? [weight[0], shapeText(weight)] : [graph.tensors[name]?.[0] ?? "", shapeText(graph.tensors[name])];
    return html`<li><code>${name || "not given"}</code> <span class="note">${[datatype, shape, weight && datatype !== "constant" && "weight"].filter(Boolean).join(" ")}</span>
      ${graph.producers.has(name) && graph.producers.get(name) !== node.key && html` from ${link(graph.producers.get(name))}`}</li>`;
  };
  const after = graph.consumers.get(node.key) ?? [];
  const attributes = Object.entries(node.attributes);
  return html`<h2>${node.op} ${node.kind !== "node" && html`<small>${node.kind}</small>`}</h2>
    ${node.name && html`<p class="note">${node.name}</p>`}
    ${node.domain && html`<p class="note">domain ${node.domain}</p>`}
    ${attributes.length > 0 && html`<h3>Attributes</h3><dl class="facts">${attributes.map(([key, value]) => html`<dt>${key}</dt><dd>${valueText(value)}</dd>`)}</dl>`}
    ${node.kind !== "input" && html`<h3>Inputs</h3><ul class="tensors">${node.inputs.map(tensor)}</ul>`}
    ${node.kind !== "output" && html`<h3>Outputs</h3><ul class="tensors">${node.outputs.map(tensor)}</ul>`}
    ${after.length > 0 && html`<h3>Feeds</h3><p class="links">${after.map(link)}</p>`}`;
}

const million = (n) => (n >= 1e6 ? `${(n / 1e6).toFixed(n >= 1e8 ? 0 : 1)} million` : n.toLocaleString("en"));

function Overview({ graph, onQuery }) {
  const counts = new Map();
  graph.nodes.forEach(({ kind, op }) => kind === "node" && counts.set(op, (counts.get(op) ?? 0) + 1));
  const size = [...graph.weights.values()].reduce((sum, [, shape]) => sum + (shape ? shape.reduce((product, n) => product * n, 1) : 0), 0);
  const opset = graph.opsets[""] ?? graph.opsets["ai.onnx"];
  return html`<h2>${graph.name || "Graph"}</h2>
    <p class="note">${[plural(graph.nodes.filter(({ kind }) => kind === "node").length, "node"), size > 0 && `${million(size)} weights`, opset && `opset ${opset}`, graph.producer && `written by ${graph.producer}`].filter(Boolean).join(" · ")}</p>
    <h3>Operators</h3><p class="links">${[...counts].sort(([, a], [, b]) => b - a).map(([op, n]) => html`<button class="chip" onClick=${() => onQuery(op)}>${op} <small>${n}</small></button>`)}</p>`;
}

function Found({ nodes, onChoose }) {
  return html`<p class="note" role="status">${plural(nodes.length, "node")}${nodes.length > LISTED && `, the first ${LISTED}`}</p>
    <ul class="found">${nodes.slice(0, LISTED).map(({ key, op, name, line }) => html`<li key=${key}><button class="link" onClick=${() => onChoose(key)}>${op}</button> <span class="note">${name || line}</span></li>`)}</ul>`;
}

function matches(node, words) {
  const text = [node.op, node.name, ...node.inputs, ...node.outputs].join(" ").toLowerCase();
  return words.every((word) => text.includes(word));
}

export function Layers({ name, version }) {
  const [found, setFound] = useState(null);
  const [problem, setProblem] = useState("");
  const [chosen, setChosen] = useState(null);
  const [query, setQuery] = useState("");
  const load = () => read(`${aboutPath(name, version)}/layers`).then((graph) => (setFound(graph), setProblem("")), (error) => setProblem(error.message));
  useEffect(() => void load(), [name, version]);
  const graph = useMemo(() => found && graphOf(found), [found]);
  const placed = useLayout(graph);
  if (problem) return html`<${Problem} message=${problem} onRetry=${load} />`;
  if (!placed) return html`<p class="note" role="status">${graph ? `Placing ${plural(graph.nodes.length, "node")} …` : "Reading the file …"}</p>`;
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const search = (text) => (setQuery(text), setChosen(null));
  const node = graph.byKey.get(chosen);
  return html`${!graph.is_complete && html`<p class="note">The graph is too large to be shown as a whole: this is its beginning.</p>`}
    <div class="layers-page"><${Picture} graph=${graph} placed=${placed} chosen=${chosen} onChoose=${setChosen} name=${name} />
      <div class="layers-panel"><input type="search" aria-label="Search nodes" placeholder="Search nodes" value=${query} onInput=${(e) => search(e.target.value)} />
        ${(node || words.length > 0) && html`<p><button class="link" onClick=${() => (node && words.length ? setChosen(null) : search(""))}>← ${node && words.length ? "Results" : "Overview"}</button></p>`}
        ${node ? html`<${Node} graph=${graph} node=${node} onChoose=${setChosen} />`
          : words.length > 0 ? html`<${Found} nodes=${graph.nodes.filter((each) => matches(each, words))} onChoose=${setChosen} />`
          : html`<${Overview} graph=${graph} onQuery=${search} />`}</div></div>`;
}
