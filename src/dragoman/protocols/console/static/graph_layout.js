// Layered layout of a graph: edges run downwards, and the order in each layer keeps them from crossing where it can.
// (Source: Sugiyama, Tagawa and Toda, Methods for visual understanding of hierarchical system structures, 1981.)

const SWEEPS = 8;
const GAP = 28;
const LAYER_GAP = 52;
const POINT_WIDTH = 12; // of an edge that passes a layer

const MAX_PASSED = 12; // layers that an edge passes with a place in each; a longer one runs over what is there

function lists(pairs) {
  const found = new Map();
  for (const [key, value] of pairs) (found.get(key) ?? found.set(key, []).get(key)).push(value);
  return found;
}

// The layer of each node: one below the lowest of those that feed it. Nodes of a cycle are in the first ones.
function layersOf(nodes, edges) {
  const layer = new Map(nodes.map(({ key }) => [key, 0]));
  const fed = lists(edges.map(({ from, to }) => [from, to]));
  const waiting = new Map(nodes.map(({ key }) => [key, 0]));
  for (const { to } of edges) waiting.set(to, waiting.get(to) + 1);
  const free = nodes.map(({ key }) => key).filter((key) => waiting.get(key) === 0);
  for (let i = 0; i < free.length; i++) {
    for (const to of fed.get(free[i]) ?? []) {
      layer.set(to, Math.max(layer.get(to), layer.get(free[i]) + 1));
      waiting.set(to, waiting.get(to) - 1);
      if (waiting.get(to) === 0) free.push(to);
    }
  }
  for (const { key, isSource } of nodes) {
    const ends = (fed.get(key) ?? []).map((to) => layer.get(to));
    if (isSource && ends.length > 0) layer.set(key, Math.max(Math.min(...ends) - 1, 0)); // it stands above what it feeds
  }
  return layer;
}

// Edges as chains of keys, with a point in each layer that they pass.
function chainsOf(edges, layer) {
  return edges.map(({ from, to }, i) => {
    const passed = Math.max(layer.get(to) - layer.get(from) - 1, 0);
    return [from, ...Array.from({ length: passed > MAX_PASSED ? 0 : passed }, (_, k) => `point ${i} ${k}`), to];
  });
}

function orderLayers(rows, chains) {
  const links = chains.flatMap((chain) => chain.slice(1).map((key, i) => [chain[i], key]));
  const above = lists(links.map(([from, to]) => [to, from]));
  const below = lists(links);
  const position = new Map();
  const place = (row) => row.forEach((key, i) => position.set(key, (i + 0.5) / row.length));
  rows.forEach(place);
  for (let sweep = 0; sweep < SWEEPS; sweep++) {
    const isDown = sweep % 2 === 0;
    for (const row of isDown ? rows.slice(1) : rows.slice(0, -1).reverse()) {
      const means = new Map(row.map((key) => {
        const found = (isDown ? above : below).get(key);
        return [key, found ? found.reduce((sum, k) => sum + position.get(k), 0) / found.length : position.get(key)];
      }));
      row.sort((a, b) => means.get(a) - means.get(b));
      place(row);
    }
  }
}

// `nodes`: { key, width, height, isSource }; `edges`: { from, to }. Returns the boxes by key as { x, y, width, height },
// x of the center and y of the top, the points of each edge as [x, y], and the size of the whole.
export function layout(nodes, edges) {
  const layer = layersOf(nodes, edges);
  const chains = chainsOf(edges, layer);
  const rows = Array.from({ length: Math.max(...layer.values()) + 1 }, () => []);
  for (const { key } of nodes) rows[layer.get(key)].push(key);
  for (const chain of chains) chain.slice(1, -1).forEach((key, i) => rows[layer.get(chain[0]) + 1 + i].push(key));
  orderLayers(rows, chains);
  const sizes = new Map(nodes.map((node) => [node.key, node]));
  const widthOf = (key) => sizes.get(key)?.width ?? POINT_WIDTH;
  const rowWidth = (row) => row.reduce((sum, key) => sum + widthOf(key) + GAP, -GAP);
  const width = Math.max(...rows.map(rowWidth));
  const boxes = new Map();
  let y = 0;
  for (const row of rows) {
    let x = (width - rowWidth(row)) / 2;
    const height = Math.max(...row.map((key) => sizes.get(key)?.height ?? 0));
    for (const key of row) {
      boxes.set(key, { x: x + widthOf(key) / 2, y, width: widthOf(key), height: sizes.get(key)?.height ?? height });
      x += widthOf(key) + GAP;
    }
    y += height + LAYER_GAP;
  }
  const paths = chains.map((chain) => chain.flatMap((key, i) => {
    const box = boxes.get(key);
    const [top, bottom] = [[box.x, box.y], [box.x, box.y + box.height]];
    return i === 0 ? [bottom] : i === chain.length - 1 ? [top] : [top, bottom];
  }));
  const leaving = lists(edges.map(({ from }, i) => [from, paths[i]]));
  const arriving = lists(edges.map(({ to }, i) => [to, paths[i]]));
  for (const { key } of nodes) {
    spread(boxes.get(key), leaving.get(key) ?? [], 0, 1);
    spread(boxes.get(key), arriving.get(key) ?? [], -1, -2);
  }
  return { boxes, paths, width, height: y - LAYER_GAP };
}

// Move the ends of edges at a side of a box apart, in the order of where they come from or go to.
function spread(box, paths, end, next) {
  const sorted = [...paths].sort((a, b) => a.at(next)[0] - b.at(next)[0]);
  sorted.forEach((path, i) => (path.at(end)[0] = box.x + box.width * 0.6 * ((i + 1) / (sorted.length + 1) - 0.5)));
}
