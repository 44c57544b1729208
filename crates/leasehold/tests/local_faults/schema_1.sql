-- The schema of a local store in version 1, as it was published.
CREATE TABLE meta (
    one INTEGER PRIMARY KEY CHECK (one = 1), boot TEXT NOT NULL, origin INTEGER NOT NULL,
    lock_floor INTEGER NOT NULL
) STRICT;
CREATE TABLE clients (
    client INTEGER PRIMARY KEY, host TEXT NOT NULL, pid INTEGER NOT NULL, program TEXT NOT NULL,
    since INTEGER NOT NULL
) STRICT;
CREATE TABLE semaphores (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, capacity INTEGER NOT NULL, held INTEGER NOT NULL,
    waiting INTEGER NOT NULL, next_place INTEGER NOT NULL, last_fence INTEGER NOT NULL
) STRICT;
CREATE TABLE holders (
    semaphore INTEGER NOT NULL, client INTEGER NOT NULL, sequence INTEGER NOT NULL, since INTEGER NOT NULL,
    ends INTEGER, fence INTEGER, label TEXT,
    PRIMARY KEY (semaphore, client, sequence)
) STRICT, WITHOUT ROWID;
CREATE INDEX holders_by_end ON holders (semaphore, ends) WHERE ends IS NOT NULL;
CREATE INDEX holders_by_client ON holders (client, semaphore);
CREATE INDEX holders_to_claim ON holders (client) WHERE fence IS NULL;
CREATE TABLE waiters (
    semaphore INTEGER NOT NULL, place INTEGER NOT NULL, client INTEGER NOT NULL, sequence INTEGER NOT NULL,
    since INTEGER NOT NULL, ttl INTEGER, label TEXT,
    PRIMARY KEY (semaphore, place)
) STRICT, WITHOUT ROWID;
CREATE UNIQUE INDEX waiters_by_id ON waiters (client, semaphore, sequence);
CREATE TABLE evicted (
    client INTEGER NOT NULL, semaphore INTEGER NOT NULL, sequence INTEGER NOT NULL,
    PRIMARY KEY (client, semaphore, sequence)
) STRICT, WITHOUT ROWID;
CREATE TABLE locks (
    key TEXT PRIMARY KEY, fence INTEGER NOT NULL, id TEXT, acquired_at INTEGER, expires_at INTEGER
) STRICT, WITHOUT ROWID;
CREATE INDEX locks_by_end ON locks (expires_at) WHERE id IS NOT NULL;
CREATE TABLE lock_ids (id TEXT PRIMARY KEY, key TEXT NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE lock_waiters (
    key TEXT NOT NULL, client INTEGER NOT NULL, woken INTEGER NOT NULL, PRIMARY KEY (key, client)
) STRICT, WITHOUT ROWID;
CREATE INDEX lock_waiters_by_client ON lock_waiters (client, woken);
CREATE TABLE leases (
    pool TEXT NOT NULL, instance TEXT NOT NULL, last INTEGER NOT NULL, holder_until INTEGER,
    PRIMARY KEY (pool, instance)
) STRICT, WITHOUT ROWID;
CREATE INDEX leases_by_age ON leases (pool, last);
