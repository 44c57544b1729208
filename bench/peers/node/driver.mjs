// Semaphores and locks for Node, driven by a line protocol on stdin and stdout (see ../PROTOCOL.md).
//
// Usage: driver.mjs PEER URL, where PEER is a key of PEERS below.

import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { Redis } from "ioredis";
import { Mutex, Semaphore } from "redis-semaphore";
import Redlock from "redlock";

const LEASE = 10_000; // milliseconds; longer than anything is held, so that no lease ends
const now = () => process.hrtime.bigint();
const fromNow = (moment) => Number(moment - now()) / 1e6;

// Each function returns null when its time is up, else a function that releases. All keep their default polling
// interval.
const redisSemaphore = (make) => async (name, capacity, lease, within) => {
  const options = { lockTimeout: lease, acquireTimeout: within, onLockLost: () => {} };
  const one = make(name, capacity, options);
  return (await one.tryAcquire()) ? () => one.release() : null;
};

const PEERS = {
  "redis-semaphore": (redis) =>
    redisSemaphore((name, capacity, options) => new Semaphore(redis, name, capacity, options)),
  "redis-semaphore mutex": (redis) =>
    redisSemaphore((name, _capacity, options) => new Mutex(redis, name, options)),
  redlock: (redis) => {
    const redlock = new Redlock([redis]);
    redlock.on("clientError", () => {});
    return async (name, _capacity, lease, within) => {
      // It counts attempts, not time: as many as fit in at its default interval.
      const retryCount = Math.max(1, Math.floor(within / 200));
      try {
        const lock = await redlock.acquireWithOptions(name, lease, { retryCount });
        return () => lock.unlock();
      } catch (error) {
        if (error instanceof Redlock.LockError) return null;
        throw error;
      }
    };
  },
};

const [peer, url] = process.argv.slice(2);
const redis = new Redis(url);
let acquire;
// At most one waiter holds, and at most one has released and may not ask again yet.
let [mayRelease, mayRejoin] = [() => {}, () => {}];
let firstGrant;
const firstGranted = new Promise((resolve) => (firstGrant = resolve));

const commands = {
  async pairs(prefix, tasks, names, capacity, windowMs) {
    let [done, stop] = [0, false];
    const work = async (task) => {
      while (!stop) {
        for (let n = task % names; n < names && !stop; n += tasks) {
          const release = await acquire(`${prefix}-${n}`, capacity, LEASE, LEASE);
          if (!release) throw new Error("an uncontended lock was not acquired");
          await release();
          done += 1;
        }
      }
    };
    const running = Promise.all(Array.from({ length: tasks }, (_, task) => work(task)));
    running.catch(() => {});
    await sleep(windowMs / 5);
    const [before, begun] = [done, now()];
    await sleep(windowMs);
    const [pairs, nanos] = [done - before, now() - begun];
    stop = true;
    await running;
    return `ok ${pairs} ${nanos} ${done}`;
  },

  async repeat(name, count) {
    for (let index = 0; index < count; index += 1) {
      const release = await acquire(name, 1, LEASE, LEASE);
      await release();
    }
    return "ok";
  },

  async contend(name, waiters, startsAt, step, hold, endsAt) {
    const [start, end] = [BigInt(startsAt), BigInt(endsAt)];
    const records = [];
    const work = async (index) => {
      await sleep(Math.max(0, fromNow(start + BigInt(index) * BigInt(step))));
      for (let asked = now(); asked < end; asked = now()) {
        const release = await acquire(name, 1, LEASE, Math.max(1, fromNow(end)));
        if (!release) {
          records.push(`${index} ${asked} 0 0`);
          break;
        }
        const granted = now();
        if (hold > 0) await sleep(hold / 1e6);
        records.push(`${index} ${asked} ${granted} ${now()}`);
        await release();
      }
    };
    await Promise.all(Array.from({ length: waiters }, (_, index) => work(index)));
    return [`ok ${records.length}`, ...records].join("\n");
  },

  async ring(name, waiters, startsAt, step) {
    const work = async (index) => {
      await sleep(Math.max(0, fromNow(BigInt(startsAt) + BigInt(index) * BigInt(step))));
      for (;;) {
        const release = await acquire(name, 1, LEASE, LEASE);
        if (!release) continue;
        console.log(`granted ${now()}`);
        await new Promise((resolve) => (mayRelease = resolve));
        const released = now();
        await release();
        console.log(`released ${released}`);
        await new Promise((resolve) => (mayRejoin = resolve));
      }
    };
    for (let index = 0; index < waiters; index += 1) work(index);
  },

  async release() {
    mayRelease();
  },

  async rejoin() {
    mayRejoin();
  },

  async hold(name, leaseMs) {
    if (!(await acquire(name, 1, leaseMs, LEASE))) throw new Error("a free lock was not acquired");
    return "ok";
  },

  async wait(name, count, leaseMs, timeLimitMs) {
    for (let index = 0; index < count; index += 1) {
      acquire(name, 1, leaseMs, timeLimitMs).then((release) => {
        if (release) firstGrant(now());
        return release?.();
      });
    }
    return "ok";
  },

  async granted() {
    return `ok ${await firstGranted}`;
  },
};

const oneLine = (error) => `error ${String(error?.message ?? error).split(/\s+/).join(" ")}`;

redis.on("error", () => {}); // the command that fails reports it
try {
  await redis.ping();
  acquire = PEERS[peer](redis);
  console.log("ok");
} catch (error) {
  console.log(oneLine(error));
  process.exit(1);
}
for await (const line of createInterface({ input: process.stdin })) {
  // Times are too large to be exact as numbers, so they and names stay text.
  const [command, ...words] = line.split(" ");
  const values = words.map((word) => (/^\d{1,15}$/.test(word) ? Number(word) : word));
  try {
    const answer = await commands[command](...values);
    if (answer) console.log(answer);
  } catch (error) {
    console.log(oneLine(error));
  }
}
process.exit(0);
