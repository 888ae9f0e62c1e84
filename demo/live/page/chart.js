// Distance to the encoding of the whole set against the number of elements.

import { format } from "./drawing.js";

const [LEFT, TOP] = [34, 14];

function node(tag, attributes, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

/** @param {[number, number, number][]} history Count, and the distances of both ways. */
export function drawChart(svg, history, total, unit) {
  const [width, height] = [svg.clientWidth || 480, svg.clientHeight || 240];
  const [right, bottom] = [width - 8, height - 34];
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  const highest = Math.max(1, ...history.map(([, , wrong]) => Math.min(wrong, 4)));
  const x = (count) => LEFT + ((right - LEFT) * count) / total;
  const y = (distance) => bottom - ((bottom - TOP) * Math.min(distance, highest)) / highest;
  const parts = [];
  for (const level of [0, highest / 2, highest]) {
    parts.push(node("line", { class: "axis", x1: LEFT, x2: right, y1: y(level), y2: y(level) }));
    parts.push(node("text", { x: LEFT - 6, y: y(level) + 4, "text-anchor": "end" },
      Number(level.toFixed(1))));
  }
  for (const count of [0, total / 2, total]) {
    parts.push(node("text", { x: x(count), y: bottom + 18,
      "text-anchor": count === 0 ? "start" : count === total ? "end" : "middle" },
      count === total ? `${count} ${unit}` : count));
  }
  for (const [place, name, label] of [[1, "fold", "folded"], [2, "wrong", "chunk and average"]]) {
    const points = history.map((entry) => `${x(entry[0]).toFixed(1)},${y(entry[place]).toFixed(1)}`);
    if (points.length > 1) parts.push(node("path", { class: `${name}-line`, d: `M${points.join("L")}` }));
    const last = history.at(-1);
    if (last) {
      const late = last[0] > 0.6 * total;
      const below = place === 1 && last[1] <= last[2];
      parts.push(node("text", { class: `${name}-text`, x: x(last[0]) + (late ? -8 : 8),
        y: Math.min(bottom - 4, Math.max(TOP + 8, y(last[place]) + (below ? 16 : -8))),
        "text-anchor": late ? "end" : "start" }, `${label}: ${format(last[place])}`));
    }
  }
  svg.replaceChildren(...parts);
}
