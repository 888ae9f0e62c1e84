// Digits: pixels arrive, and a model completes the picture.

import { color, grey, heat, paint, picture, shuffled } from "./drawing.js";

export class DigitView {
  unit = "pixels";
  texts = {
    arrived: "A digit is a set of 784 pixels: row, column and brightness. It is hidden; reveal it.",
    result: "What the model predicts",
    resultNote: "A small network reads the state and predicts all pixels, from those that have " +
      "arrived.",
    slots: "14 × 14 slots. Each keeps how many pixels near it have arrived, and their mean " +
      "brightness: 392 numbers, however many pixels come.",
    encoding: "Four slots: how many pixels are near, and their mean brightness.",
    error: "Error of the completion",
    errorNote: "mean squared, per pixel; brightness is from −1 to 1",
    compare: "Chunk and average is a common mistake: every 28 pixels are encoded as if they were " +
      "the whole digit, and the encodings are averaged.",
  };

  constructor(about) {
    this.side = about.side;
    this.grid = about.grid;
    this.cursor = [14, 14];
  }

  load(example, number) {
    this.values = example.elements.map(([, , brightness]) => brightness);
    const all = [...this.values.keys()];
    const middle = (this.side - 1) / 2;
    const radius = (place) =>
      Math.hypot(Math.floor(place / this.side) - middle, (place % this.side) - middle);
    this.orders = {
      "at random": shuffled([...all], number),
      "row by row": all,
      "column by column": [...all].sort((a, b) => (a % this.side) - (b % this.side) || a - b),
      "from the centre": [...all].sort((a, b) => radius(a) - radius(b)),
    };
  }

  /** Elements under a point of the canvas, from 0 to 1, within the brush. */
  pick(x, y, brush) {
    return this.around(Math.floor(y * this.side), Math.floor(x * this.side), brush);
  }

  around(row, column, brush) {
    const found = [];
    for (let r = row - brush; r <= row + brush; r++) {
      for (let c = column - brush; c <= column + brush; c++) {
        if (r >= 0 && c >= 0 && r < this.side && c < this.side) found.push(r * this.side + c);
      }
    }
    return found;
  }

  atCursor(brush) {
    return this.around(...this.cursor, brush);
  }

  move(down, right) {
    const clamp = (value) => Math.min(this.side - 1, Math.max(0, value));
    this.cursor = [clamp(this.cursor[0] + down), clamp(this.cursor[1] + right)];
    return `row ${this.cursor[0] + 1}, column ${this.cursor[1] + 1}`;
  }

  drawArrived(canvas, session, showCursor) {
    const context = canvas.getContext("2d");
    const size = canvas.width / this.side;
    const colors = [color("fold"), color("wrong")];
    context.fillStyle = color("unknown");
    context.fillRect(0, 0, canvas.width, canvas.height);
    for (const [place, machine] of session.holder) {
      const [row, column] = [Math.floor(place / this.side), place % this.side];
      const level = grey((this.values[place] + 1) / 2);
      context.fillStyle = `rgb(${level})`;
      context.fillRect(column * size, row * size, size - 1, size - 1);
      if (session.count > 1) {
        context.fillStyle = colors[machine];
        context.fillRect(column * size, row * size + size - 5, size - 1, 4);
      }
    }
    if (showCursor) {
      context.strokeStyle = color("focus");
      context.lineWidth = 3;
      context.strokeRect(this.cursor[1] * size, this.cursor[0] * size, size - 1, size - 1);
    }
  }

  build(result, slots) {
    this.mean = picture("Completion", "the predicted digit", this.side, "fold");
    this.scale = picture("Uncertainty", "brighter: the model is less sure of the pixel", this.side);
    this.wrong = picture("Chunk and average (wrong)", "what the average of chunks gives",
      this.side, "wrong");
    this.truth = picture("The digit itself", "hidden from the model", this.side);
    this.alone = [0, 1].map((machine) => picture(`Machine ${"AB"[machine]} alone`,
      "from its own state", this.side));
    result.replaceChildren(...[this.mean, this.scale, this.truth, this.wrong, ...this.alone]
      .map(({ figure }) => figure));
    this.density = picture("Pixels near each slot", "brighter: more", this.grid);
    this.value = picture("Mean brightness near each slot", "black to white", this.grid);
    slots.replaceChildren(this.density.figure, this.value.figure);
  }

  show(found) {
    paint(this.mean.canvas, found.view.mean, { low: -1 });
    paint(this.scale.canvas, found.view.scale, { low: 0.1, high: 1, shade: heat });
    paint(this.wrong.canvas, found.wrong.mean, { low: -1 });
    paint(this.truth.canvas, this.values, { low: -1 });
    paint(this.density.canvas, found.view.density, { high: 8, shade: heat });
    paint(this.value.canvas, found.view.value, { low: -1 });
    this.alone.forEach(({ figure, canvas }, machine) => {
      figure.hidden = !found.alone.length;
      if (found.alone.length) paint(canvas, found.alone[machine].mean, { low: -1 });
    });
  }

  describe(found) {
    return `Error of the completion ${found.view.error.toFixed(3)}; chunk and average ` +
      `${found.wrong.error.toFixed(3)}.`;
  }
}
