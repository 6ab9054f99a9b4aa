// A map of an output over two parameters of a simulator, with the point, the gradient and contour lines.
import { modelPath, read } from "./api.js";
import { Choice } from "./choice.js";
import { viridis } from "./colors.js";
import { total, withValue } from "./differences.js";
import { contours, inParts, oneByOne, refined, spaced, ticks } from "./grid.js";
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { Scale } from "./masks.js";
import { format } from "./plot.js";
import { delimited, saveFile } from "./save.js";

// Points a side of the grids that are drawn one after the other. Each has the points of the one before, which are not evaluated again.
const ROWS_SIDES = [9, 41, 121]; // if a request takes many points; the last one only if they are fast
const SINGLE_SIDES = [7, 13, 25];
const FINE_MS = 400;
const MAX_TABLE = 41;
const FAST_CALL_MS = 100; // of a model whose map is drawn without a click
const FAST_MS = 5; // of a point of such a map, else it stays coarse
const LOG_NAME = /log_?(density|prob|likelihood|posterior|pdf|p$)/i;
const LEVELS = 9;
const [LEFT, TOP, SIDE] = [52, 10, 380];
const [WIDTH, HEIGHT] = [LEFT + SIDE + 14, TOP + SIDE + 44];
const LONGEST_TICK = 6; // characters
const ARROW = 70;
const STEPS = 40; // of the arrow keys from side to side

const SHOWN = {
  "as it is": { of: () => (v) => v, title: (name) => name },
  exp: { of: (most) => (v) => Math.exp(v - most), title: (name) => `exp(${name}), largest = 1` },
  log10: { of: () => (v) => (v > 0 ? Math.log10(v) : null), title: (name) => `log10 of ${name}` },
};

const isKnown = (v) => typeof v === "number" && Number.isFinite(v);

// A function that returns a V2 request with points as its rows, if each input takes rows; else null.
function rowsBody({ input, metadata, outWrt }) {
  const { inputs = [], outputs = [] } = metadata;
  const takesRows = inputs.length === input.length && inputs.every(({ shape }, k) => shape.length === 2 && shape[0] === -1 && shape[1] === input[k].length);
  if (!takesRows || outputs[outWrt]?.shape.length !== 2) return null;
  return (points) => ({
    inputs: inputs.map(({ name, datatype }, k) => ({
      name, datatype, shape: [points.length, input[k].length],
      data: points.flatMap((point) => point[k]),
    })),
    outputs: [{ name: outputs[outWrt].name }],
  });
}

// Whether a model rejected a point, or failed at it: others may have values.
const isOfPoint = ({ status }) => [400, 422, 500].includes(status);

// Call `onValues` with points and the sums of an output there, by as few requests as possible. A point where the model fails
// has the value null, and `onFailure` gets its error, which it may throw.
async function evaluateAll({ name, body, points, evaluate, signal, onValues, onFailure }) {
  const alone = (part) => oneByOne(part, async (point) => {
    signal.throwIfAborted();
    let value = null;
    try {
      value = sumOf(await evaluate(point, signal));
    } catch (error) {
      if (!isOfPoint(error)) throw error;
      onFailure(error);
    }
    onValues([point], [value]);
  });
  const together = async (part) => {
    try {
      const { outputs: [{ data }] } = await read(`${modelPath(name)}/infer`, { method: "POST", body: body(part), signal });
      const width = data.length / part.length;
      onValues(part, part.map((_, i) => sumOf(data.slice(i * width, (i + 1) * width))));
    } catch (error) {
      if (!isOfPoint(error)) throw error;
      await alone(part); // one of them fails
    }
  };
  await (body ? inParts(points, together) : alone(points));
}

const sumOf = (vector) => (vector.every(isKnown) ? total(vector) : null);

// The picture of the values as an address. The first row of values is the lowest of the picture.
function pictureOf(values, side, [low, high]) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [side, side];
  const image = new ImageData(side, side);
  values.forEach((v, at) => {
    if (!isKnown(v)) return;
    const pixel = (side - 1 - Math.floor(at / side)) * side + (at % side);
    image.data.set([...viridis((v - low) / (high - low || 1)), 255], 4 * pixel);
  });
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas.toDataURL();
}

function rangeOf(values) {
  const known = values.filter(isKnown);
  return known.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
}

// Where the least and the greatest value are, in words.
function extremes({ values, axes, names, side, failures, isDone }) {
  const at = (pick) => {
    const i = values.indexOf(pick);
    return `${format(pick)} at ${names[0]} = ${format(axes[0][i % side])}, ${names[1]} = ${format(axes[1][Math.floor(i / side)])}`;
  };
  const [low, high] = rangeOf(values);
  const count = values.filter((v) => v !== undefined).length;
  const failed = failures.length > 0 ? ` The model fails at ${failures.length} of ${count} points: ${failures[0]}` : "";
  return `${isKnown(low) ? `Least ${at(low)}; greatest ${at(high)}.` : "No point has a value."}${failed}${isDone ? "" : ` ${count} points so far.`}`;
}

// Short enough for the margin.
const tickText = (v) => (String(v).length <= LONGEST_TICK ? String(v) : v.toExponential(1));

function Drawing({ map, shown, point, gradient, onPoint }) {
  const { values, side, bounds, names } = map;
  const holder = useRef(null);
  const [isDragged, setIsDragged] = useState(false);
  const shownRange = useMemo(() => rangeOf(shown), [shown]);
  const url = useMemo(() => pictureOf(shown, side, shownRange), [shown]);
  const lines = useMemo(() => {
    const [a, b] = shownRange;
    if (!(b > a)) return "";
    const cell = SIDE / (side - 1);
    const place = (x, y) => `${(LEFT + x * cell).toFixed(1)} ${(TOP + SIDE - y * cell).toFixed(1)}`;
    return spaced(a, b, LEVELS + 2).slice(1, -1).flatMap((level) => contours(shown, side, side, level))
      .map(([x0, y0, x1, y1]) => `M${place(x0, y0)}L${place(x1, y1)}`).join("");
  }, [shown]);
  const width = (axis) => bounds[axis][1] - bounds[axis][0];
  const x = (v) => LEFT + (SIDE * (v - bounds[0][0])) / width(0);
  const y = (v) => TOP + SIDE - (SIDE * (v - bounds[1][0])) / width(1);
  const inside = (v, axis) => Math.min(bounds[axis][1], Math.max(bounds[axis][0], v));
  const round = (v) => Number(v.toPrecision(4));
  const move = (event) => {
    const box = holder.current.getBoundingClientRect();
    const at = [((event.clientX - box.left) * WIDTH) / box.width, ((event.clientY - box.top) * HEIGHT) / box.height];
    onPoint([(at[0] - LEFT) / SIDE, (TOP + SIDE - at[1]) / SIDE].map((share, axis) => round(inside(bounds[axis][0] + share * width(axis), axis))));
  };
  const press = (event) => {
    const step = event.shiftKey ? 5 : 1;
    const by = { ArrowLeft: [-step, 0], ArrowRight: [step, 0], ArrowDown: [0, -step], ArrowUp: [0, step] }[event.key];
    if (!by) return;
    event.preventDefault();
    onPoint(point.map((v, i) => round(inside(v + (by[i] * width(i)) / STEPS, i))));
  };
  // Of steepest ascent on the map, at right angles to the contour lines: the axes may have different scales.
  const ascent = gradient?.map((g, i) => g * width(i));
  const length = ascent && Math.hypot(...ascent);
  const arrow = length > 0 && ascent.map((g) => (ARROW * g) / length);
  const [px, py] = [x(point[0]), y(point[1])];
  const isInside = point.every((v, i) => v >= bounds[i][0] && v <= bounds[i][1]);
  const label = `Map over ${names[0]} and ${names[1]}, the point at ${format(point[0])}, ${format(point[1])}. Arrow keys move it.`;
  return html`<svg ref=${holder} class="map" viewBox=${`0 0 ${WIDTH} ${HEIGHT}`} tabindex="0" role="application" aria-label=${label} onKeyDown=${press}
      onPointerDown=${(e) => (setIsDragged(true), e.currentTarget.setPointerCapture(e.pointerId), move(e))} onPointerMove=${(e) => isDragged && move(e)}
      onPointerUp=${() => setIsDragged(false)}>
    <defs><marker id="map-tip" viewBox="0 0 10 10" refX="7" refY="5" markerWidth="5" markerHeight="5" orient="auto"><path d="M0 0L10 5L0 10z" /></marker></defs>
    <clipPath id="map-frame"><rect x=${LEFT} y=${TOP} width=${SIDE} height=${SIDE} /></clipPath>
    <image clip-path="url(#map-frame)" href=${url} x=${LEFT - SIDE / (side - 1) / 2} y=${TOP - SIDE / (side - 1) / 2} width=${(SIDE * side) / (side - 1)} height=${(SIDE * side) / (side - 1)} preserveAspectRatio="none" />
    <path class="contour" d=${lines} />
    <rect class="frame" x=${LEFT} y=${TOP} width=${SIDE} height=${SIDE} />
    ${ticks(...bounds[0]).map((v) => html`<g key=${`x${v}`}><path class="tick" d=${`M${x(v)} ${TOP + SIDE}v5`} />
      <text x=${x(v)} y=${TOP + SIDE + 20} text-anchor="middle">${tickText(v)}</text></g>`)}
    ${ticks(...bounds[1]).map((v) => html`<g key=${`y${v}`}><path class="tick" d=${`M${LEFT} ${y(v)}h-5`} />
      <text x=${LEFT - 9} y=${y(v) + 4} text-anchor="end">${tickText(v)}</text></g>`)}
    <text class="axis" x=${LEFT + SIDE / 2} y=${HEIGHT - 6} text-anchor="middle">${names[0]}</text>
    <text class="axis" transform=${`translate(13 ${TOP + SIDE / 2}) rotate(-90)`} text-anchor="middle">${names[1]}</text>
    ${isInside && html`${arrow && html`<path class="arrow back" d=${`M${px} ${py}l${arrow[0]} ${-arrow[1]}`} /><path class="arrow" marker-end="url(#map-tip)" d=${`M${px} ${py}l${arrow[0]} ${-arrow[1]}`} />`}
      <circle class="point" cx=${px} cy=${py} r="6" />`}
  </svg>`;
}

function Table({ map }) {
  const { values, axes, names, side } = map;
  const step = Math.ceil(side / MAX_TABLE);
  const few = Array.from({ length: Math.ceil(side / step) }, (_, i) => i * step);
  return html`<div class="scroll short" tabindex="0" role="region" aria-label="Values of the map"><table class="values">
    <thead><tr><th scope="col">${names[1]} \\ ${names[0]}</th>${few.map((i) => html`<th scope="col" class="number">${format(axes[0][i])}</th>`)}</tr></thead>
    <tbody>${few.map((j) => html`<tr><th scope="row">${format(axes[1][j])}</th>${few.map((i) => html`<td class="number">${format(values[j * side + i])}</td>`)}</tr>`)}</tbody></table></div>`;
}

const csvOf = ({ values, axes, names, side, title }) =>
  delimited({ shape: [values.length, 3], data: values.map((v, at) => [axes[0][at % side], axes[1][Math.floor(at / side)], v ?? "nan"]) }, ",", [...names, title]);

// `parameters`: [{ k, i, name }] of all parameters that have sliders; `ranges`: [low, high] of element i of vector k as
// ranges[k][i]; `title`: of the values.
export function SimulatorMap({ name, input, metadata, config, result, ranges, target: [inWrt, outWrt], title, parameters, evaluate, onInput }) {
  const [chosen, setChosen] = useState([0, 1]);
  const [map, setMap] = useState(null);
  const axes = chosen.map((at) => parameters[at]);
  const bounds = axes.map(({ k, i }) => ranges[k][i]);
  const isSame = chosen[0] === chosen[1];
  const hasArea = bounds.every(([low, high]) => high > low);
  const isFast = !isSame && hasArea && result.ms < FAST_CALL_MS;
  const [progress, setProgress] = useState(isFast ? "…" : null); // a text
  const [problem, setProblem] = useState("");
  const [note, setNote] = useState("");
  const [mode, setMode] = useState(LOG_NAME.test(metadata.outputs?.[outWrt]?.name ?? "") ? "exp" : "as it is");
  const [isTable, setIsTable] = useState(false);
  const abort = useRef(null);
  const runs = useRef(0); // that were asked for: they are not replaced
  const work = useRef(null); // the grid that is computed, or that was stopped
  // What the values depend on: all but the two parameters.
  const rest = axes.reduce((vectors, { k, i }) => withValue(vectors, k, i, null), input);
  const key = JSON.stringify([chosen, bounds, rest, config, outWrt]);
  const isPart = (grid) => grid?.key === key && !grid.isDone; // it can be continued

  // `isAsked`: by a click. Others end after the first grid if the model is slow.
  async function run(isAsked) {
    runs.current += isAsked;
    abort.current?.abort();
    const mine = new AbortController();
    abort.current = mine;
    setProblem("");
    setNote("");
    setProgress("…");
    const body = Object.keys(config).length === 0 ? rowsBody({ input, metadata, outWrt }) : null;
    const sides = body ? ROWS_SIDES : SINGLE_SIDES;
    if (!isPart(work.current)) work.current = { key, level: 0, values: Array(sides[0] ** 2).fill(undefined), failures: [], isDone: false };
    const grid = work.current;
    const onFailure = (error) => {
      if (!isAsked) mine.abort(error); // a failure may be many lines of a log
      mine.signal.throwIfAborted();
      grid.failures.push(error.message);
    };
    const draw = () => {
      const side = sides[grid.level];
      setMap({ ...grid, values: [...grid.values], failures: [...grid.failures], side, bounds, axes: bounds.map((range) => spaced(...range, side)), names: axes.map((axis) => axis.name), title });
    };
    // Evaluate the points that have no value. Returns the time in milliseconds.
    async function fill() {
      const side = sides[grid.level];
      const [across, up] = bounds.map((range) => spaced(...range, side));
      const indices = new Map(); // of points
      grid.values.forEach((v, at) => v === undefined && indices.set(
        withValue(withValue(input, axes[0].k, axes[0].i, across[at % side]), axes[1].k, axes[1].i, up[Math.floor(at / side)]), at));
      let left = indices.size;
      const onValues = (points, values) => {
        points.forEach((point, i) => (grid.values[indices.get(point)] = values[i]));
        left -= points.length;
        setProgress(`${side} x ${side} points, ${Math.round(100 * (1 - left / indices.size))} %`);
        if (grid.level === 0) draw();
      };
      const started = performance.now();
      await evaluateAll({ name, body, points: [...indices.keys()], evaluate, signal: mine.signal, onValues, onFailure });
      return performance.now() - started;
    }
    try {
      while (!grid.isDone) {
        const count = grid.values.filter((v) => v === undefined).length;
        const ms = await fill();
        const side = sides[grid.level];
        const isEnough = body && grid.level === 1 && (ms > FINE_MS || grid.failures.length > 0);
        grid.isDone = isEnough || grid.level === sides.length - 1;
        draw();
        if (!isAsked && ms / count > FAST_MS) break;
        if (!grid.isDone) grid.values = refined(grid.values, side, sides[++grid.level]);
      }
    } catch (error) {
      if (!isAsked && isOfPoint(error)) {
        work.current = null;
        setMap(null);
        setNote(`The model fails somewhere in these ranges: compute the map for the other points. ${error.message}`);
      } else if (error.name !== "AbortError") setProblem(error.message);
    }
    runs.current -= isAsked;
    if (abort.current === mine) setProgress(null);
  }
  useEffect(() => () => abort.current?.abort(), []);
  // A model that is fast shows its map without a click; another one only on request.
  useEffect(() => void (isFast && runs.current === 0 && run(false)), [name, JSON.stringify(bounds), JSON.stringify(chosen), outWrt]);

  const shown = useMemo(() => {
    if (!map) return null;
    const of = SHOWN[mode].of(rangeOf(map.values)[1]);
    return map.values.map((v) => (isKnown(v) ? of(v) : null));
  }, [map, mode]);
  const choice = (at) => html`<label>${at === 0 ? "across" : "up"} <select value=${chosen[at]} onChange=${(e) => setChosen(chosen.map((old, j) => (j === at ? Number(e.target.value) : old)))}>
    ${parameters.map((parameter, i) => html`<option value=${i}>${parameter.name}</option>`)}</select></label>`;
  const point = axes.map(({ k, i }) => input[k][i]);
  const gradient = result.gradient && result.input === input && axes.every(({ k }) => k === inWrt) ? axes.map(({ i }) => result.gradient[i]) : null;
  const isStale = map && map.key !== key;
  return html`<section aria-label="Map"><h2>Map</h2>
    <div class="choices">${parameters.length > 2 && [choice(0), choice(1)]}
      <${Choice} label="show" value=${mode} options=${Object.keys(SHOWN)} onChange=${setMode} />
      ${progress === null
        ? html`<button type="button" disabled=${isSame || !hasArea} onClick=${() => run(true)}>${isPart(map) ? "Continue" : map ? "Compute again" : "Compute the map"}</button>`
        : html`<button type="button" disabled=${false} onClick=${() => abort.current.abort()}>Stop</button>`}
      ${map && html`<button type="button" aria-pressed=${isTable} onClick=${() => setIsTable(!isTable)}>Table</button>
        <button type="button" onClick=${() => saveFile(`${name}-map.csv`, `${csvOf(map)}\n`, "text/csv")}>CSV</button>`}
    </div>
    ${map && (isTable ? html`<${Table} map=${map} />` : html`<${Drawing} map=${map} shown=${shown} point=${point} gradient=${isStale ? null : gradient}
        onPoint=${(values) => onInput(axes.reduce((vectors, { k, i }, j) => withValue(vectors, k, i, values[j]), input))} />
      <p class="note scale-title">${SHOWN[mode].title(map.title)}</p><${Scale} range=${rangeOf(shown)} />`)}
    <p class=${problem ? "error" : "note"} role="status">${problem || (progress && `computing ${progress}`) || (isSame && "Choose two different parameters.") ||
      note || (isStale && "Something else has changed since: compute it again.") || (map && extremes(map))}</p>
  </section>`;
}
