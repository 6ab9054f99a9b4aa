// The layout of a large graph, beside the page.
import { layout } from "./graph_layout.js";

addEventListener("message", ({ data: { nodes, edges } }) => postMessage(layout(nodes, edges)));
