/**
 * When and how a stream that broke goes on.
 *
 * Owns: what was received, what counts as broken, how long and how often it is tried again. Does not
 * know: calls.
 */

/**
 * @typedef {object} ResumePolicy How long an outage may last before a stream fails with its cause.
 * @property {number} [limitMs] Longest time without any progress: 60 000.
 * @property {number} [backoffMinMs] First pause: 100. It doubles with every attempt in vain.
 * @property {number} [backoffMaxMs] Longest pause: 2 000. Each is shortened at random by up to half.
 */
export const DEFAULT_RESUME = { limitMs: 60_000, backoffMinMs: 100, backoffMaxMs: 2_000 };

/** What was received of one generation, and the request that goes on from there. */
export class GenerationLog {
  #request;
  #sequences = new Map();
  #requestId;
  #seed;

  constructor(request) {
    this.#request = request;
    this.hasBegun = false;
    this.hasTokens = false;
    for (const entry of request.resume ?? []) {
      const { index = 0, tokenIds = [] } = entry;
      this.#sequences.set(index, { ...entry, index, tokenIds: [...tokenIds] });
    }
  }

  add(response) {
    if (!this.hasBegun) {
      this.#requestId = response.requestId;
      this.#seed = response.seed;
      this.hasBegun = true;
    }
    for (const { index, tokenIds, finishReason } of response.outputs) {
      if (!this.#sequences.has(index)) this.#sequences.set(index, { index, tokenIds: [] });
      const sequence = this.#sequences.get(index);
      for (const id of tokenIds) sequence.tokenIds.push(id);
      sequence.finishReason = finishReason;
      this.hasTokens ||= tokenIds.length > 0;
    }
  }

  nextRequest() {
    if (!this.hasBegun) return this.#request;
    // Without any token, an empty entry says that this takes the id over all the same.
    const resume = this.#sequences.size ? [...this.#sequences.values()] : [{ index: 0 }];
    const sampling = { ...this.#request.sampling, seed: this.#seed };
    return { ...this.#request, requestId: this.#requestId, sampling, resume };
  }
}

/** The attempts of one call: whether to try again, and after how long. */
export class Outage {
  #policy;
  #endsAt;
  #attempts = 0;
  #since;

  constructor(policy, timeoutMs) {
    this.#policy = policy;
    this.#endsAt = timeoutMs === undefined ? Infinity : Date.now() + timeoutMs;
  }

  /** Something came: the next break is a new outage. */
  over() {
    this.#attempts = 0;
    this.#since = undefined;
  }

  /** Of the next attempt: the timeout holds over all of them. */
  callOptions() {
    return this.#endsAt === Infinity ? {} : { deadline: this.#endsAt };
  }

  /**
   * The pause before the next attempt, undefined where the error is final.
   *
   * @param {{code?: string, reason?: string, retryAfterMs?: number}} error
   * @param {GenerationLog} log A server that never answered is a mistake, not an outage.
   */
  pauseMs(error, { hasBegun, hasTokens }) {
    const policy = this.#policy;
    if (!policy || !hasBegun || !isBroken(error)) return undefined;
    // The server waited for a worker itself.
    if (error.reason === 'NO_REPLICA' && !hasTokens) return undefined;
    const now = Date.now();
    this.#since ??= now;
    const longest = Math.min(policy.backoffMinMs * 2 ** this.#attempts++, policy.backoffMaxMs);
    const pauseMs = Math.max(longest * (0.5 + Math.random() / 2), error.retryAfterMs ?? 0);
    return now + pauseMs < Math.min(this.#since + policy.limitMs, this.#endsAt) ? pauseMs : undefined;
  }
}

/** Whether it was the connection or the server that went away, not the request that failed. */
function isBroken({ code, reason }) {
  if (code === 'UNAVAILABLE' || reason === 'OVERLOADED') return true;
  // A server that ends in a hurry cancels its calls, without a word of its own.
  return code === 'CANCELLED' && !reason;
}

/** Throws the signal's reason as soon as it is aborted. */
export function pause(ms, signal) {
  return new Promise((resolve, reject) => {
    const abort = () => {
      clearTimeout(timer);
      reject(signal.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener('abort', abort);
      resolve();
    }, ms);
    signal?.addEventListener('abort', abort, { once: true });
    if (signal?.aborted) abort();
  });
}
