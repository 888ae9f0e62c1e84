// The page: tabs, controls, mouse and keyboard.

import { drawChart } from "./chart.js";
import { DigitView } from "./digits.js";
import { format, make } from "./drawing.js";
import { Session } from "./session.js";
import { ShapeView } from "./shapes.js";

const $ = (id) => document.getElementById(id);
const VIEWS = { digits: DigitView, shapes: ShapeView };
const SPEEDS = [2, 10, 40, 150, 600]; // elements per second
const TICK = 50; // milliseconds
const SPOKEN = 1500; // milliseconds of rest before the summary is read out

let about, part, view, session, history, latest, playing, speech;

// ---- parts and sets ----------------------------------------------------------------------------

async function choosePart(name) {
  part = about.find((one) => one.name === name);
  view = new VIEWS[name](part);
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const chosen = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
  }
  $("stage").setAttribute("aria-labelledby", `tab-${name}`);
  for (const [id, key] of [["arrived-note", "arrived"], ["result-title", "result"],
    ["result-note", "resultNote"], ["slots-note", "slots"], ["error-name", "error"],
    ["error-note", "errorNote"], ["compare-note", "compare"], ["encoding-note", "encoding"]]) $(id).textContent = view.texts[key];
  if (part.source) $("arrived-note").textContent += ` The shapes are ${
    part.source === "ModelNet40" ? "of ModelNet40" : part.source}.`;
  $("turn-label").hidden = name !== "shapes";
  $("arrived").setAttribute("aria-label", `${part.elements} ${view.unit}, hidden until they arrive`);
  $("slots").classList.remove("layers");
  view.build($("result"), $("slots"));
  $("example").replaceChildren(...part.examples.map((label, number) =>
    make("option", { value: number }, name === "digits" ? `${number + 1}: ${label}` :
      `${number + 1}: ${label.replaceAll("_", " ")}`)));
  $("removable").textContent = part.removable ?
    "The state keeps sums, so elements can be taken back exactly." :
    "The state keeps maxima, so elements cannot be taken back.";
  for (const id of ["undo", "erase"]) $(id).disabled = !part.removable;
  await chooseExample(0);
}

async function chooseExample(number) {
  pause();
  const answer = await fetch(`api/${part.name}/${number}`);
  view.load(await answer.json(), number);
  const chosen = $("order").value;
  $("order").replaceChildren(...Object.keys(view.orders).map((name) =>
    make("option", {}, name)));
  if (chosen in view.orders) $("order").value = chosen;
  startOver(number);
}

function startOver(number = session.example) {
  pause();
  session?.close();
  session = new Session(part.name, number, onResult, (text) => ($("problem").textContent = text));
  history = [];
  latest = null;
  $("problem").textContent = "";
  showMachines();
  session.send([]);
}

// ---- showing -----------------------------------------------------------------------------------

function onResult(result, actions, count) {
  if (actions.some((action) => action.remove)) history = history.filter(([n]) => n < count);
  latest = result;
  history.push([count, ...result.distance]);
  view.show(result);
  for (const place of [0, 1]) {
    $(`difference-${place}`).textContent = format(result.difference[place]);
    $(`distance-${place}`).textContent = format(result.distance[place]);
    $(`error-${place}`).textContent = format(place ? result.wrong.error : result.view.error);
  }
  $("so-far").textContent = `${count} ${view.unit}`;
  $("encoding").textContent = result.encoding.map(([slot, ...numbers]) =>
    `slot ${slot}: ${numbers.map((number) => number.toPrecision(3)).join("  ")}`).join("\n");
  $("encoding").dataset.count = count;
  drawChart($("chart"), history, part.elements, view.unit);
  showMachines();
  draw();
  clearTimeout(speech);
  speech = setTimeout(() => ($("summary").textContent = summary(count)), SPOKEN);
}

function summary(count) {
  return `${count} of ${part.elements} ${view.unit} have arrived. ${view.describe(latest)} ` +
    `Difference to encoding them at once: folded ${format(latest.difference[0])}, chunk and ` +
    `average ${format(latest.difference[1])}.`;
}

function showMachines() {
  const counts = session.machines.map((state) => state?.count ?? 0);
  $("machines").replaceChildren(...counts.flatMap((count, machine) => [
    make("dt", {}, make("span", { class: `dot dot-${machine}` }),
      counts.length > 1 ? `Machine ${"AB"[machine]}` : "One machine"),
    make("dd", {}, `${count} ${view.unit}, ${part.state_bytes.toLocaleString("en")} bytes`),
  ]));
  $("split").disabled = session.count > 1;
  $("merge").disabled = $("target").disabled = session.count < 2;
  const there = session.holder.size;
  $("progress").max = part.elements;
  $("progress").value = there;
  $("counted").textContent = `${there} of ${part.elements} ${view.unit}`;
  $("undo").disabled = !part.removable || !there;
  $("all").disabled = $("play").disabled = there === part.elements;
}

function draw() {
  view.drawArrived($("arrived"), session, document.activeElement === $("arrived"));
}

// ---- arriving ----------------------------------------------------------------------------------

function reveal(elements) {
  session.reveal(elements, $("target").value);
  showMachines();
  draw();
}

function takeBack(elements) {
  if (!part.removable) return;
  session.takeBack(elements);
  showMachines();
  draw();
}

function brush(elements) {
  if ($("erase").checked) takeBack(elements);
  else reveal(elements);
}

function play() {
  let owed = 0;
  $("play").textContent = "Pause";
  playing = setInterval(() => {
    owed += (SPEEDS[$("speed").value] * TICK) / 1000;
    const due = Math.floor(owed);
    if (!due) return;
    owed -= due;
    const next = view.orders[$("order").value].filter((one) => !session.holder.has(one));
    reveal(next.slice(0, due));
    if (next.length <= due) pause();
  }, TICK);
}

function pause() {
  clearInterval(playing);
  playing = null;
  $("play").textContent = "Start";
}

// ---- controls ----------------------------------------------------------------------------------

$("play").addEventListener("click", () => (playing ? pause() : play()));
$("all").addEventListener("click", () => reveal(view.orders[$("order").value]));
$("undo").addEventListener("click", () => takeBack(session.seen.slice(-1)));
$("clear").addEventListener("click", () => startOver());
$("split").addEventListener("click", () => { session.split(); showMachines(); draw(); });
$("merge").addEventListener("click", () => { session.merge(); showMachines(); draw(); });
$("example").addEventListener("change", () => chooseExample(+$("example").value));
$("turn").addEventListener("input", () => { view.angle = +$("turn").value; draw(); });
$("speed").addEventListener("input", showSpeed);

function showSpeed() {
  $("speed-text").textContent = `${SPEEDS[$("speed").value]} per second`;
}

for (const tab of document.querySelectorAll("[role=tab]")) {
  tab.addEventListener("click", () => choosePart(tab.id.replace("tab-", "")));
  tab.addEventListener("keydown", (event) => {
    if (event.key !== "ArrowRight" && event.key !== "ArrowLeft") return;
    const other = tab.nextElementSibling ?? tab.previousElementSibling;
    other.focus();
    other.click();
  });
}

const canvas = $("arrived");
let drawn = null; // the last place of a stroke

function stroke(event) {
  const box = canvas.getBoundingClientRect();
  const at = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  const from = drawn ?? at;
  const steps = Math.max(1, Math.ceil(Math.hypot(at[0] - from[0], at[1] - from[1]) * 28));
  const found = new Set();
  for (let step = 1; step <= steps; step++) { // a quick stroke has no gaps
    const [x, y] = [0, 1].map((axis) => from[axis] + ((at[axis] - from[axis]) * step) / steps);
    for (const element of view.pick(x, y, +$("brush").value)) found.add(element);
  }
  drawn = at;
  brush([...found]);
}

canvas.addEventListener("pointerdown", (event) => {
  canvas.setPointerCapture(event.pointerId);
  drawn = null;
  stroke(event);
});
canvas.addEventListener("pointermove", (event) => {
  if (event.buttons & 1) stroke(event);
});
canvas.addEventListener("focus", draw);
canvas.addEventListener("blur", draw);
canvas.addEventListener("keydown", (event) => {
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key in moves) {
    clearTimeout(speech);
    $("summary").textContent = view.move(...moves[event.key]);
    draw();
  } else if (event.key === " ") brush(view.atCursor(+$("brush").value));
  else if (event.key === "Delete" || event.key === "Backspace") {
    takeBack(view.atCursor(+$("brush").value));
  } else if (event.key === "u") takeBack(session.seen.slice(-1));
  else return;
  event.preventDefault();
});
addEventListener("resize", () => drawChart($("chart"), history, part.elements, view.unit));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

showSpeed();
about = await (await fetch("api/about")).json();
await choosePart("digits");
document.documentElement.dataset.ready = "yes"; // for tests
