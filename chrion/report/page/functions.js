"use strict";

// Pure functions of the timeline page: ticks, formats, views and bars.

const UNITS = [["s", 1000], ["ms", 1], ["µs", 1e-3]];

/** Return the smallest step of the form 1, 2 or 5 x 10^n that is not below `least`. */
function niceStep(least) {
  const power = Math.pow(10, Math.floor(Math.log10(least) + 1e-9));
  for (const factor of [1, 2, 5]) if (factor * power >= least * (1 - 1e-9)) return factor * power;
  return 10 * power;
}

/**
 * Return the ticks of a time axis.
 *
 * @param start, end - the visible range in ms.
 * @param count - about how many ticks fit; there are never more than `count + 1`.
 * @returns the unit of the labels, and for each tick its time in ms and its label. Labels of neighbours differ.
 */
function makeTicks(start, end, count) {
  const span = end - start;
  const [unit, scale] = span >= 20000 ? UNITS[0] : span >= 1 ? UNITS[1] : UNITS[2];
  const step = niceStep(span / scale / Math.max(1, count));
  const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  const ticks = [];
  const last = Math.floor(end / scale / step + 1e-9);
  for (let k = Math.ceil(start / scale / step - 1e-9); k <= last; k += 1) {
    const label = (k * step).toFixed(Math.min(digits, 20));
    ticks.push({ ms: k * step * scale, label: k === 0 ? "0" : label });
  }
  return { unit, ticks };
}

/** Return a duration with three or more significant digits and its unit. */
function formatMs(ms) {
  if (ms === null || ms === undefined) return "not known";
  if (ms === 0) return "0 ms";
  const size = Math.abs(ms);
  const [unit, scale] = size >= 1000 ? UNITS[0] : size >= 1 ? UNITS[1] : UNITS[2];
  const value = ms / scale;
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value)) + 1e-9));
  return value.toFixed(Math.min(digits, 6)) + " " + unit;
}

/** Return a time with enough digits to distinguish it from times that differ by 1/1000 of a range. */
function formatTime(ms, range) {
  const digits = Math.min(9, Math.max(2, 3 - Math.floor(Math.log10(range))));
  return ms.toFixed(digits) + " ms";
}

/** Return a number of bytes with a decimal unit. */
function formatBytes(bytes) {
  if (bytes === null || bytes === undefined) return "not known";
  if (bytes < 1000) return bytes + " B";
  const units = ["kB", "MB", "GB"];
  let value = bytes / 1000, at = 0;
  while (value >= 1000 && at < 2) { value /= 1000; at += 1; }
  return value.toPrecision(value >= 100 ? 3 : 2) + " " + units[at];
}

/** Return the index of the first value of a non-decreasing list that is greater than `limit`. */
function firstAbove(values, limit) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > limit) high = middle; else low = middle + 1;
  }
  return low;
}

/** Return a view of another range, within 0 to `total`; the time at a share of the width stays at that position. */
function zoomed(view, share, factor, total) {
  const least = Math.min(total, 1e-5);
  const range = Math.min(total, Math.max(least, (view.end - view.start) * factor));
  const fixed = view.start + share * (view.end - view.start);
  return moved({ start: fixed - share * range, end: fixed - share * range + range }, 0, total);
}

/** Return a view moved by some ms, within 0 to `total`. */
function moved(view, ms, total) {
  const range = view.end - view.start;
  const start = Math.min(Math.max(0, view.start + ms), Math.max(0, total - range));
  return { start, end: start + range };
}

/**
 * Return the bars of one lane, in order of time: the spans, and those of several operators divided in proportion to the
 * operators' costs where these are known.
 */
function laneBars(data, chart, lane) {
  const { spans } = chart, costs = data.operators.predicted_ms;
  const bars = { start: [], end: [], span: [], operator: [], reach: [] };
  const add = (start, end, span, operator) => {
    bars.start.push(start); bars.end.push(end); bars.span.push(span); bars.operator.push(operator);
    bars.reach.push(Math.max(end, bars.reach.length ? bars.reach[bars.reach.length - 1] : end));
  };
  spans.lane.forEach((row, at) => {
    if (row !== lane) return;
    const start = spans.start_ms[at], end = spans.end_ms[at];
    const members = spans.segment[at] < 0 ? [] : data.segments[spans.segment[at]];
    const total = costs ? members.reduce((sum, i) => sum + costs[i], 0) : 0;
    if (members.length < 2 || !(total > 0)) return add(start, end, at, members.length ? members[0] : -1);
    let done = 0;
    for (const i of members) {
      const from = start + (end - start) * (done / total);
      done += costs[i];
      add(from, start + (end - start) * (done / total), at, i);
    }
  });
  return bars;
}
