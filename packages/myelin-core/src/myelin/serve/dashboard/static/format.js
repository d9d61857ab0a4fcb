// Numbers and times as people read them.

const THIN = "\u202f";

/** A duration given in milliseconds: 4.2 ms, 1.53 s, 2 min 5 s, 3 h 12 min. */
export function duration(ms) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return "–";
  if (ms < 1) return `${ms.toFixed(2)}${THIN}ms`;
  if (ms < 100) return `${ms.toFixed(1)}${THIN}ms`;
  if (ms < 1000) return `${Math.round(ms)}${THIN}ms`;
  const s = ms / 1000;
  if (s < 10) return `${s.toFixed(2)}${THIN}s`;
  if (s < 60) return `${s.toFixed(1)}${THIN}s`;
  if (s < 3600) return `${Math.floor(s / 60)}${THIN}min ${Math.floor(s % 60)}${THIN}s`;
  if (s < 86400) return `${Math.floor(s / 3600)}${THIN}h ${Math.floor((s % 3600) / 60)}${THIN}min`;
  return `${Math.floor(s / 86400)}${THIN}d ${Math.floor((s % 86400) / 3600)}${THIN}h`;
}

/** How long ago, coarsely. */
export function age(seconds) {
  return seconds < 1 ? "now" : seconds < 60 ? `${Math.floor(seconds)}${THIN}s` : duration(seconds * 1000);
}

/** Bytes in powers of 1000. */
export function bytes(count) {
  if (!count) return "–";
  let size = count;
  for (const unit of ["B", "kB", "MB", "GB"]) {
    if (size < 999.5) return `${unit === "B" || size >= 100 ? Math.round(size) : size.toFixed(1)}${THIN}${unit}`;
    size /= 1000;
  }
  return `${size.toFixed(1)}${THIN}TB`;
}

/** A count, with thin spaces between thousands. */
export function count(number) {
  return Math.round(number ?? 0).toString().replace(/\B(?=(\d{3})+(?!\d))/g, THIN);
}

/** A rate with three digits or so. */
export function rate(number) {
  if (number === null || number === undefined) return "–";
  if (number === 0) return "0";
  return number >= 100 ? count(number) : number >= 10 ? number.toFixed(1) : number.toFixed(2);
}

/** A share as percent. */
export function percent(share) {
  return share === null || share === undefined ? "–" : `${Math.round(share * 100)}${THIN}%`;
}

/** Dollars, with as many decimals as small amounts need. */
export function dollars(amount) {
  return `$${amount.toFixed(amount !== 0 && amount < 1 ? 4 : 2)}`;
}

/** The time of day of Unix seconds. */
export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}

/** The middle value; null of none. */
export function median(numbers) {
  const sorted = numbers.filter((n) => n !== null && n !== undefined).sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor((sorted.length - 1) / 2)] : null;
}

/** A name with spaces, beginning with a capital. */
export function words(name) {
  const text = String(name).replaceAll("_", " ");
  return text.charAt(0).toUpperCase() + text.slice(1);
}
