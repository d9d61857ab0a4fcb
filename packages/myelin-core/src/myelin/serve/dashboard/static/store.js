// The page's state and what increments do to it: the same as `apply` in state.py.

export const RINGS = { samples: 600, answers: 400, news: 200, logs: 1500 };

/** A state with nothing in it. */
export function empty() {
  return {
    version: 0,
    tables: { run: {}, phases: {}, nodes: {}, spans: {}, stages: {}, requests: {} },
    rings: { samples: [], answers: [], news: [], logs: [] },
  };
}

/** Apply an increment to `state`, in place; the names of the tables and rings that changed. */
export function apply(state, increment) {
  const changed = new Set();
  for (const [name, rows] of Object.entries(increment.rows)) {
    changed.add(name);
    const table = (state.tables[name] ??= {});
    for (const [key, row] of Object.entries(rows)) {
      if (row === null) delete table[key];
      else table[key] = row;
    }
  }
  for (const [name, items] of Object.entries(increment.items)) {
    changed.add(name);
    const ring = (state.rings[name] ??= []);
    ring.push(...items);
    const bound = RINGS[name] ?? 500;
    if (ring.length > bound) ring.splice(0, ring.length - bound);
  }
  state.version = increment.version;
  return changed;
}
