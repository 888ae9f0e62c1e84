// What has arrived, and the states of the machines. The server keeps neither.

export class Session {
  /**
   * @param {string} part Name of the model.
   * @param {number} example Number of the set.
   * @param {(result: object) => void} onResult Called with each answer.
   * @param {(message: string) => void} onProblem Called if there is none.
   */
  constructor(part, example, onResult, onProblem) {
    Object.assign(this, { part, example, onResult, onProblem });
    this.machines = [null]; // null is an empty state
    this.count = 1; // machines, after all actions
    this.holder = new Map(); // element -> machine, in the order of arrival
    this.actions = [];
    this.busy = false;
    this.closed = false;
    this.turn = 0;
  }

  get seen() {
    return [...this.holder.keys()];
  }

  /** Let elements arrive: at one machine, or at all of them in turns. */
  reveal(elements, target) {
    const fresh = elements.filter((element) => !this.holder.has(element));
    const shares = Array.from({ length: this.count }, () => []);
    for (const element of fresh) {
      const machine = this.count === 1 ? 0 : target === "turns" ? this.turn++ % this.count : +target;
      this.holder.set(element, machine);
      shares[machine].push(element);
    }
    this.send(shares.flatMap((add, machine) => (add.length ? [{ machine, add }] : [])));
  }

  /** Remove elements from the states that hold them. */
  takeBack(elements) {
    const shares = Array.from({ length: this.count }, () => []);
    for (const element of elements) {
      if (this.holder.has(element)) {
        shares[this.holder.get(element)].push(element);
        this.holder.delete(element);
      }
    }
    this.send(shares.flatMap((remove, machine) => (remove.length ? [{ machine, remove }] : [])));
  }

  split() {
    this.count = 2;
    this.turn = 0;
    this.send([{ split: true }]);
  }

  merge() {
    this.count = 1;
    for (const element of this.holder.keys()) this.holder.set(element, 0);
    this.send([{ merge: true }]);
  }

  /** Send actions; those that come while an answer is under way are sent together, after it. */
  async send(actions) {
    this.actions.push(...actions);
    if (this.busy) return;
    this.busy = true;
    try {
      do {
        const taken = this.actions;
        this.actions = [];
        const body = { part: this.part, example: this.example, machines: this.machines,
          actions: taken, seen: this.seen };
        const answer = await fetch("api/step", { method: "POST", body: JSON.stringify(body) });
        const result = await answer.json();
        if (!answer.ok) throw new Error(result.message);
        if (this.closed) return;
        this.machines = result.machines;
        this.onResult(result, taken, body.seen.length);
      } while (this.actions.length);
    } catch (error) {
      this.onProblem(`No answer: ${error.message} Reload the page.`);
    } finally {
      this.busy = false;
    }
  }

  close() {
    this.closed = true;
  }
}
