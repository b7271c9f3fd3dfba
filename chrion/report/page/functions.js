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

/** Return the last part of an operator's path, without the type that stands before the names of unnamed nodes. */
function shortName(name) {
  const last = name.slice(name.lastIndexOf("/") + 1) || name;
  return last.replace(/^\w+:(?=.)/, "");
}

/** Return black or white, whichever has the greater contrast to a colour (relative luminance of WCAG 2). */
function inkOn(colour) {
  const [r, g, b] = [1, 3, 5].map((at) => {
    const c = parseInt(colour.slice(at, at + 2), 16) / 255;
    return c <= 0.04045 ? c / 12.92 : Math.pow((c + 0.055) / 1.055, 2.4);
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#FFFFFF";
}

/**
 * Return the groups of bars of one lane that are drawn as one: adjacent bars narrower than `narrow` form blocks, each of
 * which ends as soon as it is `block` wide; every other bar is a group of its own. All widths are in ms.
 */
function mergeBars(bars, narrow, block) {
  const groups = [];
  let open = false;
  for (let at = 0; at < bars.start.length; at += 1) {
    const start = bars.start[at], end = bars.end[at], isNarrow = end - start < narrow, last = groups[groups.length - 1];
    if (open && isNarrow && start - last.end < narrow / 4) {
      last.last = at;
      last.end = Math.max(last.end, end);
      open = last.end - last.start < block;
    } else {
      groups.push({ first: at, last: at, start, end });
      open = isNarrow;
    }
  }
  return groups;
}

/**
 * Return the shares of a group's time by category, those of at least `least` in order of category; category null has the
 * remaining ones. Bars without duration count if all have none.
 */
function sharesOf(bars, group, categoryOf, least) {
  const sums = new Map();
  let total = 0;
  for (let at = group.first; at <= group.last; at += 1) {
    const ms = Math.max(bars.end[at] - bars.start[at], 1e-12), category = categoryOf(at);
    sums.set(category, (sums.get(category) || 0) + ms);
    total += ms;
  }
  const kept = [...sums].map(([category, ms]) => ({ category, share: ms / total })).filter((part) => part.share >= least);
  kept.sort((one, other) => one.category - other.category);
  const rest = 1 - kept.reduce((sum, part) => sum + part.share, 0);
  if (rest > 1e-9) kept.push({ category: null, share: rest });
  return { parts: kept, categories: sums.size };
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
