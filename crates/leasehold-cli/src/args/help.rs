//! The headings of the options, and the texts after them: examples, and what else a user needs to know.

/// The headings in the help of a subcommand, each with its options. Other options are below "Options".
pub(super) const HEADINGS: [(&str, &[&str]); 5] = [
    ("Limits", &["capacity", "weight", "rate", "burst", "pin", "unpin"]),
    (
        "Time",
        &[
            "ttl",
            "at_least",
            "once_per",
            "lease",
            "grace",
            "wait",
            "no_wait",
            "conflict_code",
            "lasting",
        ],
    ),
    (OUTPUT, &["label", "verbose", "json", "raw", "watch"]),
    ("Store", &["store", "ca_certificate"]),
    ("Redis", &["namespace", "lock_prefix", "lock_layout"]),
];

pub(super) const OUTPUT: &str = "Output";

pub(super) const AFTER: &str = "\
Examples:
  leasehold run -n 2 build -- make          two builds at a time, the others queue
  leasehold lock nightly -- ./nightly.sh    one at a time, fenced
  leasehold ls                              list what is held, and the number of waiters
  leasehold show build                      list the holders and the waiters
  leasehold top                             watch them; pause, resume, limit, release
  leasehold lookup nightly                  show who holds the lock: host, process, label
  leasehold limit build 4 --pin             four at a time from now on, ignoring -n
  leasehold pause build --reason 'disk full'
  leasehold serve                           watch and control them in a browser

Exit codes:
  the child's    the child ran and ended (128 + n if by signal n)
  1              nothing has that name or id; doctor: leases are not safe on the store
  64             bad usage or bad input, a pinned limit, a name that another program uses
  69             store unreachable, also if --wait ends during an outage; no room in the store
  70             internal error
  75             run, lock: not acquired, because --wait ran out or --no-wait was given (-E sets
                 another code); drain, forget: the name is in use; bench: another bench is running
  77             access denied, or the store cannot be used: the scheme of the URL does not match
                 the server (single, Sentinel or Cluster), no such database, a damaged file
  124            the lease was lost or its TTL ended, and the child was stopped
  126            the child could not be run
  127            the child was not found
  128 + n        signal n ended the wait, top, serve or show --watch";

pub(super) const RUN: &str = "\
Examples:
  leasehold run -n 3 deploy -- ./deploy.sh
  leasehold run --store redis://redis.internal -n 5 --label invoices api -- ./import
  leasehold run --store redis-cluster://node1,node2,node3 -n 5 api -- ./import
  leasehold run -n 1 --no-wait backup -- ./backup.sh || echo 'one is running already'
  leasehold run -n 4 gpu -- sh -c 'CUDA_VISIBLE_DEVICES=$((LEASEHOLD_SLOT - 1)) ./train'
  leasehold run -n 5 --rate 100/1m --burst 10 api -- ./call    5 at a time, 100 in any minute
  leasehold run -n 64 --weight 16 memory -- ./build            16 of 64 gigabytes

The child gets these variables:
  LEASEHOLD_NAME          the name of the semaphore
  LEASEHOLD_ID            the id of the permit
  LEASEHOLD_SLOT          the lowest number, from 1 on, that no other child of that name has
  LEASEHOLD_FENCE         the fence as a number, to calculate with
  LEASEHOLD_FENCE_PADDED  the fence with leading zeros, to compare as text
  LEASEHOLD_X_SLOT, LEASEHOLD_X_ID, LEASEHOLD_X_FENCE
                          the same, where X is the name in capitals, with _ for every character
                          that is no ASCII letter or digit: LEASEHOLD_GPU_SLOT. A command inside
                          this one replaces the other variables, but not these

When the child ends, other processes in its process group have --grace to end before they are
stopped. The permit is released after that.

-n sets the limit of the name. `ls` and `top` show the limit in the column OF, and JSON has it in
the field `capacity`.

On several hosts whose clocks differ by less than a minute, this cron job runs once:
  leasehold run -n 1 --no-wait -E 0 --at-least 1m nightly -- ./nightly.sh

A password in --store is visible to other users in ps. Read the URL from a file instead:
  LEASEHOLD_STORE=$(cat /etc/leasehold/store) || exit; export LEASEHOLD_STORE
The child inherits that variable.

If the child runs `leasehold run` with the same name, that inner command is refused (exit code 64):
it could wait forever for the permit of its own parent.

Durations (D): 500ms, 30s, 5m, 1h30m.";

pub(super) const LOCK: &str = "\
Examples:
  leasehold lock nightly -- ./nightly.sh
  leasehold lock --wait 30s --lease 10s invoice:42 -- ./send-invoice 42
  leasehold lock --ttl 1h --label cron nightly -- ./nightly.sh    stop it after an hour: exit 124
  leasehold lock --once-per 23h -E 0 daily -- ./daily.sh          once a day, on the first host

The lock is not fair: when it is released, the first process to ask gets it. If order matters, use
`leasehold run -n 1`.

The child gets these variables:
  LEASEHOLD_NAME          the key of the lock
  LEASEHOLD_ID            the id of the lock
  LEASEHOLD_FENCE         the fence as a number, to calculate with
  LEASEHOLD_FENCE_PADDED  the fence with leading zeros, to compare as text
  LEASEHOLD_X_ID, LEASEHOLD_X_FENCE
                          the same, where X is the key in capitals, with _ for every character
                          that is no ASCII letter or digit. A command inside this one replaces
                          the other variables, but not these
A resource that the child writes to should reject an older fence.

--once-per counts from the start of the child, however the child ends. Give a little less than the
interval of the schedule. If this process is killed, the lock expires after --lease, and another
host may run the job in the same period.

A password in --store is visible to other users in ps. Read the URL from a file instead:
  LEASEHOLD_STORE=$(cat /etc/leasehold/store) || exit; export LEASEHOLD_STORE
The child inherits that variable.

If the child runs `leasehold lock` with the same key, that inner command is refused (exit code 64):
it would wait forever for the lock of its own parent.

Durations (D): 500ms, 30s, 5m, 1h30m.";

pub(super) const LS: &str = "\
Examples:
  leasehold ls
  leasehold ls --json | jq '.semaphores[] | select(.waiting > 0)'

Lock ids are not shown, because a lock id can release its lock. To watch the list, use `top`.

If the disk is full or read-only, ls, show and lookup still read the store, and print a warning that
it cannot be written.";

pub(super) const SHOW: &str = "\
Examples:
  leasehold show deploy
  leasehold show invoice:42
  leasehold show --watch deploy
  leasehold show --json deploy | jq -r '.holders[].id'
  leasehold show --json deploy | jq '., .also[] | select(.kind == \"lock\")'

If a semaphore, a lock and a pool have the name, all of them are shown, each under a heading.
SILENT FOR is the time since the holder or waiter last renewed its lease, on Redis. Holders renew it
every 8 s or more often, so a longer silence means that the process is dead or stopped, or cannot
reach the store. On one host nothing is renewed, because the kernel reports dead processes. TTL LEFT
is the time until --ttl ends the permit. LEASE LEFT is the time until a lock or a pool lease
expires unless it is renewed; it does not say when the job ends.

--json prints one object with the fields kind (semaphore, lock or pool), name, held, holders and
also. `also` is an array of the same objects for the other kinds of that name, usually empty.
Unknown values are null. Further fields:
  semaphore  capacity (the limit), declared, pinned, paused (lasts_seconds, by, reason), held_units,
             rate (starts, period_seconds, burst, interval_seconds), next_token_seconds, waiting,
             waits_for, waiters, oldest_hold_seconds, oldest_wait_seconds; each holder and waiter:
             id, slot_number, weight, host, pid, label, age_seconds, silent_for_seconds,
             ttl_ends_in_seconds, expires_in_seconds (until it expires unless it is renewed), fence
  lock       its holder: key, key_hash, id_hash, host, pid, label, acquired_at, age_seconds,
             expires_at, expires_in_seconds, fence
  pool       each holder: id, silent_for_seconds, expires_in_seconds

The field waits_for says what the first waiter waits for:
  room       a release: too few units are free
  rate       the next start that the rate allows
  resume     the end of a pause
  capacity   a larger limit: its weight is above the limit
  client     its client, which cannot be reached

Lock ids are not shown, because a lock id can release its lock.";

pub(super) const TOP: &str = "\
Examples:
  leasehold top
  leasehold top --store redis://redis.internal

Keys: Enter opens one name with its holders and its queue, s sorts, / filters, p pauses, r resumes,
l changes the limit, d drains, x releases the selected holder, ? shows all keys, q quits. Every
action describes what it does and asks for confirmation.

GRANTS/s counts the permits that polls have seen. A permit that is released before the next poll is
not counted, so the number is a lower bound. The store is read once a second, and less often if it
answers slowly.

NO_COLOR switches colours off. Sparklines are digits if the locale is not UTF-8. The terminal is
restored when top ends or is suspended, also by a signal (exit code 128 + n). Nothing can restore it
after SIGKILL: type `reset`.";

pub(super) const LIMIT: &str = "\
Examples:
  leasehold limit deploy              show the limit
  leasehold limit deploy 5            5, until `run -n` or a program declares another number
  leasehold limit deploy 5 --pin      5, even if `run -n` or a program declares another number
  leasehold limit deploy --unpin      the number that was declared last applies again
  leasehold limit api --rate 100/1m   at most 100 starts in any minute
  leasehold limit api --rate none     remove the rate

If the limit grows, waiters start at once. If it shrinks, no holder is stopped, and the next waiter
starts when there is room.

`ls` and `top` show the limit in the column OF, and JSON has it in the field `capacity`.";

pub(super) const PAUSE: &str = "\
Examples:
  leasehold pause deploy --reason 'release freeze'
  leasehold resume deploy

On a terminal, or with -v, waiting commands show since when the name is paused, by whom and why. A
pause has no time limit.";

pub(super) const RESUME: &str = "\
Examples:
  leasehold resume deploy";

pub(super) const DRAIN: &str = "\
Examples:
  leasehold drain deploy --wait 10m && ./maintenance.sh; leasehold resume deploy

The name stays paused, also if --wait runs out (exit code 75).

Durations (D): 500ms, 30s, 5m, 1h30m.";

pub(super) const FORGET: &str = "\
Examples:
  leasehold forget old-name --yes

Without --yes, the command only explains what it would remove (exit code 64). It fails while the
name has a holder or a waiter (exit code 75).

The last fence is removed, too. The next fence then comes from the clock. If the clock was set back,
a resource that compares fences rejects it.";

pub(super) const RELEASE: &str = "\
Examples:
  leasehold release deploy 7Vd3kQ0aZx1-0
  leasehold release invoice:42          (a lock: shows its holder)
  leasehold release --yes invoice:42    (a lock: releases it)

A waiter is cancelled: it leaves the queue, and its command ends with exit code 75.

If a permit or a lock is released, the next waiter can start at once. The child of the old holder is stopped when the holder notices:
at once for a permit on this host, within 8 s for a permit on Redis, and for a lock when it is next
renewed, within a third of its lease (12 s by default).";

pub(super) const LOOKUP: &str = "\
Examples:
  leasehold lookup invoice:42
  leasehold lookup --raw --json invoice:42
  leasehold lookup --json invoice:42 | jq '.host, .pid, .label'

The holder itself reports its host, process and label. They are unknown (- or null) if another
program holds the lock.

Without --raw the key and the lock id are shown as hashes, because a lock id can release its lock.";

pub(super) const SERVE: &str = "\
Examples:
  leasehold serve                                       read-only, http://127.0.0.1:7878/
  leasehold serve --store redis://redis.internal
  head -c 24 /dev/urandom | base64 > token && chmod 600 token
  leasehold serve --token-file token                    with actions, after a login
  leasehold serve --token-file token --listen 0.0.0.0:7878 --host leases.example.com
  curl http://127.0.0.1:7878/api/overview

Pages: semaphores with their holders and queues, locks, pools, clients, and recent events. They
update by themselves. /metrics is for Prometheus, /healthz for supervisors, /api/ for scripts: see
docs/console.md.

Without --token-file the console is read-only. On an address that is not loopback a token is
required, also for reading. serve has no TLS: use a reverse proxy, and give the host name that
browsers use as --host.

SIGINT and SIGTERM end serve (exit code 128 + n). Other exit codes: 64 if the address is in use or
the token file is not private; at the start, 69 if the store cannot be reached and 77 if it denies
access.";

pub(super) const DOCTOR: &str = "\
Examples:
  leasehold doctor --store redis://redis.internal
  leasehold doctor --store redis-cluster://node1,node2,node3
  leasehold doctor --store redis-sentinel://sentinel1,sentinel2,sentinel3/mymaster

For a cluster, doctor lists every node with its slots. For a primary behind sentinels, it lists
every sentinel and every replica. A finding that names no server applies to all primaries. --json
has the servers in the field `cluster` or `sentinel`.

Exit codes:
  0   leases are safe, though there may be warnings
  1   something does not work, or leases are not safe on this store
  64  --store is not the URL of a store
  69  the store is unreachable, is full or does not exist
  77  access denied, or the store cannot be used: the scheme of the URL does not match the server
      (single, Sentinel or Cluster), the file is damaged or belongs to another program

doctor acquires and releases a semaphore, a lock and a pool named leasehold-doctor. The store keeps
the last fence of the lock, and nothing of the semaphore and the pool.";

pub(super) const BENCH: &str = "\
Examples:
  leasehold bench --store redis://redis.internal
  leasehold bench --for 5s --json

The store is busy during the measurement. The names of the semaphores begin with leasehold-bench.
They are forgotten at the end.

Durations (D): 500ms, 30s, 5m, 1h30m.";

pub(super) const COMPLETIONS: &str = "\
Examples:
  leasehold completions bash > ~/.local/share/bash-completion/completions/leasehold
  leasehold completions zsh > ~/.zfunc/_leasehold";

pub(super) const MAN: &str = "\
Examples:
  leasehold man > ~/.local/share/man/man1/leasehold.1
  leasehold man run > ~/.local/share/man/man1/leasehold-run.1
  leasehold man run | man -l -";
