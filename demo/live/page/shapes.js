// Shapes: points arrive, and a model says which shape it is.

import { color, format, heat, make, paint, picture, shuffled } from "./drawing.js";

const RADII = [0.025, 0.07, 0.14]; // of the brush, in units of the canvas
const STEP = 0.05;
const LISTED = 8; // classes

export class ShapeView {
  unit = "points";
  texts = {
    arrived: "A shape is a set of points on its surface. Faint ones have not arrived yet.",
    result: "Which shape is it?",
    resultNote: "A small network reads the state and gives the probability of each class; the " +
      "right one is underlined.",
    slots: "6 × 6 × 6 slots in space, shown in layers. Each keeps how many points near it have " +
      "arrived, and where these are on average.",
    encoding: "Four slots: how many points are near, and the mean of their offsets to the slot.",
    error: "Probability of wrong classes",
    errorNote: "1 minus that of the right one",
    compare: "Chunk and average is a common mistake: every 32 points are encoded as if they were " +
      "the whole shape, and the encodings are averaged. The class may still be right; the encoding " +
      "is not.",
  };

  constructor(about) {
    this.grid = about.grid;
    this.classes = about.classes;
    this.cursor = [0.5, 0.5];
    this.angle = 30;
  }

  load(example, number) {
    this.points = example.elements;
    this.name = example.name;
    const all = [...this.points.keys()];
    const by = (key) => [...all].sort((a, b) => key(this.points[a]) - key(this.points[b]));
    this.orders = {
      "at random": shuffled([...all], number),
      "from below": by(([, , z]) => z),
      "from above": by(([, , z]) => -z),
      "from the left": by(([x]) => x),
    };
  }

  /** Where a point is on the canvas, from 0 to 1, and how near. */
  project([x, y, z]) {
    const turn = (this.angle * Math.PI) / 180;
    const [right, away] = [
      x * Math.cos(turn) - y * Math.sin(turn), x * Math.sin(turn) + y * Math.cos(turn)];
    const tilt = 0.45;
    return [0.5 + 0.44 * right,
      0.5 - 0.44 * (z * Math.cos(tilt) + away * Math.sin(tilt)),
      z * Math.sin(tilt) - away * Math.cos(tilt)];
  }

  pick(x, y, brush) {
    const near = this.points.map((point, place) => {
      const [px, py] = this.project(point);
      return [Math.hypot(px - x, py - y), place];
    }).filter(([distance]) => distance < RADII[brush]).sort(([a], [b]) => a - b);
    return near.slice(0, brush ? undefined : 1).map(([, place]) => place);
  }

  atCursor(brush) {
    return this.pick(...this.cursor, brush);
  }

  move(down, right) {
    const clamp = (value) => Math.min(1, Math.max(0, value));
    this.cursor = [clamp(this.cursor[0] + STEP * right), clamp(this.cursor[1] + STEP * down)];
    const there = this.pick(...this.cursor, 1).length;
    return `${Math.round(100 * this.cursor[0])}% across, ${Math.round(100 * this.cursor[1])}% down, ` +
      `${there} points near`;
  }

  drawArrived(canvas, session, showCursor) {
    const context = canvas.getContext("2d");
    const colors = [color("fold"), color("wrong")];
    const faint = color("unknown");
    context.fillStyle = color("card");
    context.fillRect(0, 0, canvas.width, canvas.height);
    const order = [...this.points.keys()].map((place) => [place, this.project(this.points[place])])
      .sort(([, a], [, b]) => a[2] - b[2]);
    for (const [place, [x, y, near]] of order) {
      const machine = session.holder.get(place);
      context.fillStyle = machine === undefined ? faint : colors[machine];
      context.beginPath();
      context.arc(x * canvas.width, y * canvas.height,
        (machine === undefined ? 3 : 5) * (1 + 0.25 * near), 0, 2 * Math.PI);
      context.fill();
    }
    if (showCursor) {
      context.strokeStyle = color("focus");
      context.lineWidth = 3;
      context.beginPath();
      context.arc(this.cursor[0] * canvas.width, this.cursor[1] * canvas.height,
        RADII[1] * canvas.width, 0, 2 * Math.PI);
      context.stroke();
    }
  }

  build(result, slots) {
    this.bars = { view: make("div"), wrong: make("div"), first: make("div"), second: make("div") };
    const block = (title, kind, bars) =>
      make("figure", { class: "wide" }, make("figcaption", {}, make("b", { class: kind }, title)), bars);
    this.alone = [block("Machine A alone", "", this.bars.first),
      block("Machine B alone", "", this.bars.second)];
    this.spread = make("p", { class: "note wide" });
    result.replaceChildren(block("Folded", "fold", this.bars.view), this.spread,
      block("Chunk and average (wrong)", "wrong", this.bars.wrong), ...this.alone);
    this.layers = Array.from({ length: this.grid }, (_, layer) => {
      const place = layer === 0 ? "lowest" : layer === this.grid - 1 ? "highest" : `layer ${layer + 1}`;
      return picture(place, "", this.grid);
    });
    slots.replaceChildren(...this.layers.map(({ figure }) => figure));
    slots.classList.add("layers");
  }

  show(found) {
    const fill = (bars, probabilities, kind) => {
      const ranked = probabilities.map((p, place) => [p, place]);
      if (ranked.length > LISTED) ranked.sort(([a], [b]) => b - a);
      bars.className = `bars ${kind}`;
      bars.replaceChildren(...ranked.slice(0, LISTED).flatMap(([p, place]) => {
        const name = this.classes[place];
        const bar = make("i");
        bar.style.transform = `scaleX(${p})`;
        return [make("b", name === this.name ? { class: "truth" } : {}, name.replaceAll("_", " ")),
          make("span", { class: "bar" }, bar), make("span", {}, p.toFixed(3))];
      }));
    };
    fill(this.bars.view, found.view.probabilities, "fold");
    fill(this.bars.wrong, found.wrong.probabilities, "wrong");
    this.spread.textContent = `Uncertainty: ${format(found.view.spread)} (entropy of the ` +
      "probabilities; 0 is certain, 1 is knowing nothing).";
    this.alone.forEach((figure, machine) => {
      figure.hidden = !found.alone.length;
      const bars = machine ? this.bars.second : this.bars.first;
      if (found.alone.length) fill(bars, found.alone[machine].probabilities, machine ? "wrong" : "fold");
    });
    const side = this.grid;
    const highest = Math.max(1, ...found.view.density);
    this.layers.forEach(({ canvas }, layer) => {
      const numbers = Array.from({ length: side * side }, (_, place) => {
        const [y, x] = [side - 1 - Math.floor(place / side), place % side];
        return found.view.density[(x * side + y) * side + layer];
      });
      paint(canvas, numbers, { high: highest, shade: heat });
    });
  }

  describe(found) {
    const best = found.view.probabilities.indexOf(Math.max(...found.view.probabilities));
    const wrong = found.wrong.probabilities.indexOf(Math.max(...found.wrong.probabilities));
    const percent = (view, place) => `${Math.round(100 * view.probabilities[place])}%`;
    return `Most probable: ${this.classes[best]}, ${percent(found.view, best)}; chunk and average: ` +
      `${this.classes[wrong]}, ${percent(found.wrong, wrong)}.`;
  }
}
