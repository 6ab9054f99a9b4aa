// A graph of models or functions as a picture, and the same as tables.
import { html } from "./html.js";
import { layout } from "./graph_layout.js";

const CHARACTER = 8.2;
const LINE = 18;
const PADDING = 8;
const MARGIN = 12;
const MAX_LABEL = 40;

const shorten = (text) => (text.length > MAX_LABEL ? `${text.slice(0, MAX_LABEL - 1)}…` : text);

// The key of an end of an edge, and how it is called.
function endOf(end) {
  const [[kind, name]] = Object.entries(end);
  return { key: `${kind} ${name}`, kind, name };
}

const ABILITIES = { evaluate: "evaluate", gradient: "gradient", apply_jacobian: "Jacobian", apply_hessian: "Hessian" };

// What a node of a graph can compute besides its outputs.
function derivatives(abilities) {
  return Object.entries(ABILITIES).slice(1).filter(([key]) => abilities[key]).map(([, label]) => label).join(", ");
}

// The abilities of a node, by where they come from.
function sources(abilities) {
  const found = new Map();
  for (const [key, label] of Object.entries(ABILITIES)) {
    if (abilities[key]) found.set(abilities[key], [...(found.get(abilities[key]) ?? []), label]);
  }
  return [...found].map(([source, labels]) => `${labels.join(", ")}: ${source}`).join("; ");
}

function nodesOf(graph) {
  const found = new Map(Object.entries(graph.nodes).map(([name, abilities]) => [`node ${name}`, { kind: "node", name, line: derivatives(abilities) }]));
  graph.edges.forEach((edge) => {
    for (const end of [endOf(edge.from), endOf(edge.to)]) {
      if (!found.has(end.key)) found.set(end.key, { kind: end.kind, name: end.kind === "constant" ? `= ${end.name}` : end.name, line: "" });
    }
  });
  return [...found].map(([key, node]) => ({
    key,
    ...node,
    isSource: node.kind === "constant",
    width: Math.max(shorten(node.name).length, node.line.length) * CHARACTER + 2 * PADDING,
    height: LINE * (node.line ? 2 : 1) + PADDING,
  }));
}

const labelOf = (edge) => (edge.tensor !== undefined ? edge.tensor : edge.size !== undefined ? String(edge.size) : "");

export function curve(points) {
  return points.slice(1).reduce((path, [x, y], i) => {
    const [fromX, fromY] = points[i];
    const middle = (fromY + y) / 2;
    return `${path} C${fromX} ${middle} ${x} ${middle} ${x} ${y}`;
  }, `M${points[0].join(" ")}`);
}

function Drawing({ graph, name }) {
  const nodes = nodesOf(graph);
  const edges = graph.edges.map((edge) => ({ from: endOf(edge.from).key, to: endOf(edge.to).key, label: labelOf(edge) }));
  const { boxes, paths, width, height } = layout(nodes, edges);
  const isLabelled = new Set(); // edges with one label from one node to another are labelled once
  const labels = edges.map(({ from, to, label }) => {
    const key = JSON.stringify([from, to, label]);
    const isNew = label !== "" && !isLabelled.has(key);
    isLabelled.add(key);
    return isNew ? shorten(label) : "";
  });
  const summary = `Graph of ${name}: ${Object.keys(graph.nodes).length} nodes, ${graph.edges.length} edges; the tables below list them`;
  const box = [-MARGIN, -MARGIN, width + 2 * MARGIN, height + 2 * MARGIN].map(Math.ceil);
  return html`<div class="scroll" tabindex="0" role="region" aria-label="Picture of the graph">
    <svg class="graph" viewBox=${box.join(" ")} width=${box[2]} height=${box[3]} role="img" aria-label=${summary}>
      <defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto"><path d="M0 0 L8 4 L0 8 z" /></marker></defs>
      ${paths.map((points) => html`<path class="edge" d=${curve(points)} marker-end="url(#arrow)" />`)}
      ${nodes.map(({ key, kind, name: text, line }) => {
        const { x, y, width: w, height: h } = boxes.get(key);
        return html`<g class=${kind}><rect x=${x - w / 2} y=${y} width=${w} height=${h} rx=${kind === "node" ? 4 : 13} />
          <text x=${x} y=${y + PADDING / 2 + 13}>${shorten(text)}</text>
          ${line && html`<text class="line" x=${x} y=${y + PADDING / 2 + 13 + LINE}>${line}</text>`}</g>`;
      })}
      ${paths.map((points, i) => {
        const [[x, y], [nextX, nextY]] = points;
        return labels[i] && html`<text class="label" x=${(x + nextX) / 2} y=${(y + nextY) / 2 + 4}>${labels[i]}</text>`;
      })}
    </svg></div>`;
}

const describe = (end) => {
  const { kind, name } = endOf(end);
  return kind === "node" ? `${name}.${end.port}` : `${kind} ${name}`;
};

export function Graph({ graph, name }) {
  const missing = Object.entries(graph.missing ?? {});
  const nodes = Object.entries(graph.nodes).map(([node, abilities]) => [node, sources(abilities)]);
  return html`<${Drawing} graph=${graph} name=${name} />
    ${missing.length > 0 && html`<p class="note">Not available: ${missing.map(([ability, reason]) => `${ability}, because ${reason}`).join("; ")}.</p>`}
    <div class="columns">
      <table><caption>Nodes</caption><thead><tr><th scope="col">name</th><th scope="col">abilities</th></tr></thead>
        <tbody>${nodes.map(([node, text]) => html`<tr><td><code>${node}</code></td><td>${text || "evaluate"}</td></tr>`)}</tbody></table>
      <table><caption>Edges</caption><thead><tr><th scope="col">from</th><th scope="col">to</th><th scope="col">${graph.edges.some((e) => e.tensor) ? "tensor" : "size"}</th></tr></thead>
        <tbody>${graph.edges.map((edge) => html`<tr><td><code>${describe(edge.from)}</code></td><td><code>${describe(edge.to)}</code></td><td>${labelOf(edge)}</td></tr>`)}</tbody></table>
    </div>`;
}
