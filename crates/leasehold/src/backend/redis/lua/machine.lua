-- The fair semaphore: applies commands to one name. `machine.rs` has the argument. The scripts in `small/` serve the
-- common cases with fewer keys, arguments and calls. This script serves everything.
--
-- KEYS    1 main     ZSET    holder -> renew_by
--         2 ttl      ZSET    holder -> hold_until
--         3 max      STRING  the capacity
--         4 waiting  ZSET    waiter -> when it was enqueued
--         5 alive    ZSET    waiter -> alive_by; and marks of cancelled waiters: see `mark_cancelled`
--         6 fence    STRING  the last fence; never expires
--         7 info     HASH    id -> "fence since heartbeat ttl label" (microseconds; "-" is none). If the permit is not
--                            ordinary, its weight and slot number follow the fence: see `field_of`
--         8 limits   STRING  the pin, the pause, the rate and the extra weight, if any: see `read_capacity`. Never
--                            expires; usually missing
--         9 slots    STRING  a bit for each slot number that is taken
--        10 foreign  STRING  when a member of another program was last seen here, in microseconds. Expires a minute
--                            later
-- ARGV    1 namespace
--         2 client             the sender
--         3 confirm_within     in microseconds
--         4 foreign_heartbeat  of members of other programs, in microseconds
--         5 channel            the end of the wake-up channels: "", or in a cluster ":" and a hash tag of the slot
--         6 name
--         7 capacity           the newest declaration of the sender; 0 if it has declared none
--         8 declares           1 if this declaration is new; 0 if it counts only where no capacity is known. If the
--                              sender also declares a rate, these follow: 1 if the rate is new, else 0; the count; the
--                              period in microseconds; the burst
--         and for each transition
--         9 transition         its name
--        10 arguments          the number of arguments that follow
--         and the arguments of the transition
-- Also, without being declared in KEYS: the channels of wake-ups (see `publish`), and
-- {ns}:acquisition_notification:{id} of members of other programs, or of ours that such a program has granted a permit.
-- In a cluster these lists are in other slots, unless the namespace has a hash tag. Without one, their members cannot
-- be notified, and are passed over.
-- Result  one flat list: the server's time in microseconds; for each id its outcome, as the transition says; the delay
--         until the next expiry (-1: none); the outlook (see `outlook`); the delay until the next token, if the first
--         waiter is the sender's and waits only for a token; for each waiter of the sender that was granted a permit its
--         id, slot number, fence and valid_for
--
-- Lua does not roll back, so everything is read before anything is written. A key of the wrong type ends the work before
-- anything has changed.
local call, try = redis.call, redis.pcall
local time = call('TIME')
local NOW = time[1] * 1000000 + time[2]

-- Scores are seconds with microseconds. They are formatted as text here: Redis would print a number with seventeen
-- digits, which takes longer than the command itself.
local function stamp(micros)
  return string.format('%d.%06d', math.floor(micros / 1000000), micros % 1000000)
end

-- Redis stores a small collection as a list, and searches it from the beginning. From this many members on, a table is
-- faster. A single member of more than 64 bytes makes Redis convert the list to a table, permanently.
local TABLE_FROM = 24
local LONG = string.rep('-', 65)

-- Returns whether a member of another program is among the first and last members of a sorted set. Ours have ids of the
-- form {the eleven characters of a client}-{number}.
local function has_foreign(key, members)
  local function is_foreign(first, last)
    local ids = call('ZRANGE', key, first, last)
    for i = 1, #ids do
      if string.sub(ids[i], 12, 12) ~= '-' or not string.find(ids[i], '^%w+%-%d+$') then return true end
    end
  end
  if members <= 100 then return is_foreign(0, -1) end
  return is_foreign(0, 49) or is_foreign(-50, -1)
end

-- Another program may write any score, even an infinite one. Scores are cut off at a hundred years from now.
local FAR = NOW + 3155760000000000

local NOW_STAMP = stamp(NOW)

-- The maximum number of ids in one call: `unpack` fails at about 8000.
local PAGE = 1000
-- The maximum number of waiters that one script passes over. Reading them takes some milliseconds, during which the
-- server serves nobody else.
local OUT_OF_REACH = 10 * PAGE

-- The maximum number of expired holders that one script removes, for the same reason. Those that are left still count as
-- holders, so nothing is granted in their place. The reply says that a lease has ended, so the client asks again.
local EXPIRED_AT_ONCE = 5 * PAGE

-- For how long a name counts as shared after a member of another program was seen, in milliseconds.
local SHARED_FOR = 60000

local NAME, MAIN, TTL, MAX, WAITING, ALIVE, FENCE, INFO, LIMITS, SLOTS, FOREIGN
-- The capacity that the sender declared last, whether that declaration is new, and the rate that it declares, if any.
local DECLARED, DECLARES, RATE
-- Whether a permit with a slot number was granted or renewed. SLOTS must outlive it.
local numbered = false
-- The numbers of holders, of holders with a TTL, and of waiters.
local held, limited, queued
-- Whether expired members have been removed. A whole request happens at one time, so once is enough.
local expired = false
-- Whether some expired holders were left, because there are too many.
local overdue
local held_before
-- The longest heartbeat in this call.
local longest = 0
local capacity, last_fence
-- The other limits, once `read_capacity` was called:
-- - `pinned`: the pinned capacity; `declared`: the capacity that was declared since, or 0 if none ever was
-- - `paused`: since when; `by`: by whom; `reason`: why
-- - `extra`: the units that the holders weigh beyond one each
-- - `count`: the most grants in any `period`; `burst`: how many of them at once, which is the maximum number of tokens
-- - `interval`: the time between two tokens, which follows from these (nil: nobody has declared or set a rate; 0:
--   explicitly no rate, stored as a count of 0); `full_at`: when no token is missing any more; `returns`: the first
--   fence whose token can be returned
-- - `changed`: whether any of that has to be written. 'if possible' means that a later call would compute the same, so
--   the write may fail on a server that is full
local limits
-- Whether the time at which the first waiter gets its token may have changed.
local news = false
-- Whether there were no holders and no waiters before. Then no expiry of a key has to be compared.
local alone
-- When a member of another program was last seen here; false: not in the last minute; nil: not read yet.
local seen_at
-- The values to write, gathered so that each key is written once; and the answer.
local main, ttls, infos, max, waiting, alive = {}, {}, {}
local outcomes, granted = { NOW }, {}
-- The place of the waiter that was enqueued last.
local place
-- The clients that could not be notified of a permit, by the prefix of their ids. Their waiters keep their places.
local out_of_reach = {}
-- The sender's waiters that were granted a permit in this call: id -> its fence, slot number and TTL.
local holding = {}

-- The functions are defined inside a function of their own. Lua captures a variable of the enclosing function at once.
-- For a variable of the same function, it searches the list of all captured variables, for each function that uses it.
-- That would take twice as long.
return (function()

local function micros(score)
  return math.min(math.floor(score * 1000000 + 0.5), FAR)
end

-- Appends two values, such as a score and a member.
local function add(list, first, second)
  local n = #list
  list[n + 1], list[n + 2] = first, second
end

local function answer(tag, a, b, c)
  add(outcomes, tag, a or 0)
  add(outcomes, b or 0, c or 0)
end

local function is_capacity(number)
  return number and number >= 1 and number <= 4294967295 and number % 1 == 0
end

-- Returns the time until an empty bucket has all tokens.
local function all_tokens()
  return limits.interval * limits.burst
end

local function is_positive(number)
  return number and number >= 1 and number <= 9007199254740991 and number % 1 == 0
end

-- Uses this rate, whose argument `Rate` in `rate.rs` has. Numbers that are no rate count as none declared.
local function use_rate(count, period, burst)
  limits.count, limits.period, limits.burst, limits.interval = nil, nil, nil, nil
  if count == 0 then
    limits.count, limits.interval = 0, 0
  elseif is_positive(count) and is_positive(period) and period <= FAR - NOW then
    burst = math.min(is_positive(burst) and burst or 1, count, 4294967295)
    limits.count, limits.period, limits.burst = count, period, burst
    limits.interval = math.ceil(period / (count - burst + 1))
  end
end

-- Declared here because functions above their definition use them.
local is_metered, settle

-- Another program may let the capacity expire, or write an invalid one. Then the capacity is what the sender declared
-- last, and it is written again: nothing that happens to this key stops the queue. Reading the key removes its expiry.
-- Otherwise a client that declares no capacity would find none while others hold. If a capacity is pinned, a value that
-- another program writes is a declaration, which is kept for later.
local function read_capacity()
  if capacity then return capacity end
  limits = { extra = 0 }
  local text = call('GET', LIMITS)
  if text then
    local numbers, by, reason = string.match(text, '^([^\n]*)\n([^\n]*)\n(.*)$')
    local known = {}
    for number in string.gmatch(numbers or '', '%S+') do known[#known + 1] = tonumber(number) or false end
    local pinned, declared = known[1], known[2]
    if is_capacity(pinned) then
      limits.pinned, limits.declared = pinned, (is_capacity(declared) or declared == 0) and declared or pinned
    end
    limits.paused, limits.by, limits.reason = known[3] or nil, by, reason
    limits.extra = known[4] or 0
    -- Without holders there is no weight. Another program or an expiry may have removed the key of the holders.
    if held == 0 and limits.extra > 0 then limits.extra, limits.changed = 0, 'if possible' end
    -- An earlier version stored an interval and a burst. The same tokens arrive at a rate of `burst` per interval.
    if #known == 8 then table.insert(known, 5, known[5] == 0 and 0 or known[6]) end
    use_rate(known[5], known[6], known[7])
    limits.full_at, limits.returns = known[8] or 0, known[9] or 0
    settle()
  end
  capacity = tonumber(call('GETEX', MAX, 'PERSIST'))
  if limits.pinned then
    if capacity ~= limits.pinned then
      if is_capacity(capacity) then limits.declared, limits.changed = capacity, true end
      max = string.format('%d', limits.pinned)
    end
    capacity = limits.pinned
  elseif not is_capacity(capacity) then
    capacity = tonumber(DECLARED)
    limits.is_unknown = capacity > 0
    if limits.is_unknown and held + queued > 0 then max = DECLARED end
  end
  return capacity
end

-- Returns the number of free units.
local function room()
  read_capacity()
  return (limits.paused and 0 or capacity) - held - limits.extra
end

function is_metered()
  read_capacity()
  return limits.interval and limits.interval > 0
end

-- No more than all tokens can be missing, even if the clock was set back.
function settle()
  if limits.interval and limits.interval > 0 and limits.full_at > NOW + all_tokens() then
    limits.full_at, limits.changed = NOW + all_tokens(), limits.changed or 'if possible'
  end
end

local function has_token()
  return not is_metered() or limits.full_at + limits.interval <= NOW + all_tokens()
end

-- Whether a permit of this weight can be granted.
local function fits(weight)
  return weight <= room() and has_token()
end

-- The newest declaration wins, unless another capacity is pinned.
local function declare(text)
  local declared = tonumber(text)
  read_capacity()
  if limits.pinned then
    if limits.declared ~= declared then limits.declared, limits.changed = declared, true end
  elseif capacity ~= declared then
    capacity, max, news = declared, text, true
  end
end

-- Returns the terms in "heartbeat ttl label". They are parsed and formatted once per script, because most ids have the
-- same terms.
local known_terms = {}
local function terms_of(text)
  local terms = known_terms[text]
  if not terms then
    local heartbeat, ttl = string.match(text, '^(%S+) (%S+)')
    heartbeat, ttl = tonumber(heartbeat), tonumber(ttl)
    terms = {
      heartbeat = heartbeat,
      ttl = ttl,
      text = text,
      valid_for = heartbeat and math.min(heartbeat, ttl or heartbeat),
      renew_by = heartbeat and stamp(NOW + heartbeat),
      hold_until = ttl and stamp(NOW + ttl),
      info = string.format(' %d ', NOW) .. text,
      -- The same with more digits: see TABLE_FROM.
      long_info = string.format(' %048d ', NOW) .. text,
    }
    known_terms[text] = terms
  end
  return terms
end

local function info_of(terms)
  return held + queued < TABLE_FROM and terms.info or terms.long_info
end

-- Reads the last fence. A Lua number is not exact from 2^53 on, and a value that is not a number cannot be counted up.
local function read_fence()
  local fence = tonumber(call('GET', FENCE) or 0)
  if not fence or fence < 0 or not (fence < 9007199254740991) or fence % 1 ~= 0 then
    error({ err = 'BADFENCE ' .. FENCE })
  end
  return fence
end

local function last_known_fence()
  return last_fence or read_fence()
end

-- Sets the rate from now on; a `count` of 0 removes it. A change adds no token: see `TokenBucket::change` in `rate.rs`.
local function set_rate(count, period, burst)
  count, period, burst = tonumber(count), tonumber(period), tonumber(burst)
  if limits.count == count and (count == 0 or limits.period == period and limits.burst == burst) then return end
  local available, wait
  if is_metered() then
    local arrived = all_tokens() - math.min(math.max(limits.full_at - NOW, 0), all_tokens())
    available = math.floor(arrived / limits.interval)
    wait = arrived == all_tokens() and math.huge or limits.interval - arrived % limits.interval
  end
  limits.full_at, limits.returns = limits.full_at or 0, last_known_fence() + 1
  use_rate(count, period, burst)
  limits.changed, news = true, true
  if not is_metered() then return end
  if not available then
    limits.full_at = 0
  else
    local missing = limits.burst - available
    limits.full_at = NOW
    if missing > 0 then
      limits.full_at = NOW + (missing - 1) * limits.interval + math.min(wait, limits.interval)
    end
  end
end

local function next_fence()
  return math.max(last_known_fence() + 1, NOW)
end

-- Also declared here because functions above their definition use them.
local parse, flush, is_gathered

-- An ordinary permit takes one unit and no slot number.
local ORDINARY = { weight = 1, numbered = false }

-- Computes again how much the holders weigh beyond one unit each, and which slot numbers are taken, from the info of
-- every holder. The stored counts can be wrong: another program has removed a holder, a key has expired, or the server
-- was full.
local function count_anew()
  if is_gathered() then flush() end
  read_capacity()
  local ids, extra = call('ZRANGE', MAIN, 0, -1), 0
  call('DEL', SLOTS)
  for from = 1, #ids, PAGE do
    for _, info in ipairs(call('HMGET', INFO, unpack(ids, from, math.min(from + PAGE - 1, #ids)))) do
      local known = parse(info)
      if known.slot > 0 then
        call('SETBIT', SLOTS, known.slot - 1, 1)
        numbered = true
      end
      if known.fence then extra = extra + known.share.weight - 1 end
    end
  end
  if extra ~= limits.extra then limits.extra, limits.changed = extra, true end
  -- This expiry is long enough until the next permit with a number extends it.
  if numbered then call('PEXPIRE', SLOTS, math.max(call('PTTL', MAIN), 10000)) end
end

-- Returns the lowest free slot number if the permit is to have one, else 0.
local function slot_for(share)
  if not share.numbered then return 0 end
  -- Without holders no number is taken.
  if held == 0 then call('DEL', SLOTS) end
  local slot = call('BITPOS', SLOTS, 0) + 1
  -- A number above the capacity cannot be right, because there are fewer holders. If the key has expired, a holder may
  -- still have the number. In both cases count again.
  if slot > read_capacity() or slot == 1 and held > 0 and call('EXISTS', SLOTS) == 0 then
    count_anew()
    slot = call('BITPOS', SLOTS, 0) + 1
  end
  return slot
end

-- Returns the first field of a holder's info, before " since heartbeat ttl label": its fence and, unless the permit is
-- ordinary, its weight, its slot number, and 1 if it has to be claimed before it counts as used.
local function field_of(fence, weight, slot, unclaimed)
  if weight == 1 and slot == 0 and unclaimed == 0 then return string.format('%d', fence) end
  return string.format('%d/%d/%d/%d', fence, weight, slot, unclaimed)
end

-- Takes the extra units, the slot number and the token of a permit. The caller adds the holder to MAIN.
local function take(share, slot, fence)
  read_capacity()
  if share.weight > 1 then limits.extra, limits.changed = limits.extra + share.weight - 1, true end
  if slot > 0 then
    call('SETBIT', SLOTS, slot - 1, 1)
    numbered = true
  end
  if is_metered() then
    if limits.full_at < NOW + limits.interval then limits.returns = fence end
    limits.full_at, limits.changed, news = math.max(limits.full_at, NOW) + limits.interval, true, true
  end
end

-- Records the fence, the info and the TTL of a holder.
local function mint(id, terms, fence, share, slot, unclaimed)
  take(share, slot, fence)
  last_fence = fence
  unclaimed = unclaimed and is_metered() and 1 or 0
  add(infos, id, field_of(fence, share.weight, slot, unclaimed) .. info_of(terms))
  if terms.hold_until then
    add(ttls, terms.hold_until, id)
    limited = limited + 1
  end
end

-- Renews the lease of a holder, or adds the holder.
local function renew(id, terms)
  longest = math.max(longest, terms.heartbeat)
  add(main, terms.renew_by, id)
end

-- Makes `id` a holder; the reply reports it. Returns its slot number, its fence and how long it is valid.
local function hold(id, terms, share)
  -- First the steps that may fail: gathered values are written even if a later step fails.
  local fence, slot = next_fence(), slot_for(share)
  mint(id, terms, fence, share, slot)
  held = held + 1
  renew(id, terms)
  return slot, fence, terms.valid_for
end

-- Parses the info of an id: its fence if it was granted a permit, since when, and its terms.
function parse(info)
  if not info then return { share = ORDINARY, slot = 0 } end
  local first, since, text = string.match(info, '^(%S+) (%S+) (.*)$')
  local fence, weight, slot, unclaimed = string.match(first or '', '^([^/]+)/(%d+)/(%d+)/(%d)$')
  local known = { fence = tonumber(fence or first), since = tonumber(since), text = text, share = ORDINARY, slot = 0 }
  if fence then
    weight, slot = tonumber(weight), tonumber(slot)
    known.share = { weight = math.max(weight, 1), numbered = slot > 0 }
    -- For a waiter, 1 means that it wants a slot number.
    known.slot, known.unclaimed = known.fence and slot or 0, unclaimed == '1'
  end
  return known
end

-- Frees the extra units and the slot number of a holder. Call it after the holder was removed from MAIN.
local function free_share(known)
  if not known.fence then return end
  if known.share.weight > 1 then
    read_capacity()
    limits.extra = math.max(limits.extra - known.share.weight + 1, 0)
    limits.changed = limits.changed or 'if possible'
  end
  -- A server that is full may refuse the write. Then the number stays taken for a while.
  if known.slot > 0 and call('EXISTS', SLOTS) == 1 then try('SETBIT', SLOTS, known.slot - 1, 0) end
end

-- Returns the tokens of grants that were never used. It starts with the latest grant, because that order returns the
-- most tokens. `TokenBucket::return_token` in `rate.rs` has the argument.
local function return_tokens(fences)
  if #fences == 0 or not is_metered() then return end
  table.sort(fences, function(one, other) return one > other end)
  for _, fence in ipairs(fences) do
    if fence >= limits.returns then
      limits.full_at, limits.changed = limits.full_at - limits.interval, limits.changed or 'if possible'
      if fence ~= last_known_fence() then limits.returns = last_known_fence() end
    end
  end
end

-- Whether the permit is part of the counts that `count_anew` computes.
local function is_special(known)
  return known.fence and (known.share.weight > 1 or known.slot > 0)
end

-- Removes holders that have expired, or that another program has removed. Adds the fences of permits that were never
-- claimed to `unused`, so that their tokens can be returned. Returns whether another program had already removed some of these holders from MAIN, so that the counts
-- are wrong.
local function forget(ids, unused)
  local scores, removed = call('ZMSCORE', MAIN, unpack(ids)), false
  news = true
  for i, info in ipairs(call('HMGET', INFO, unpack(ids))) do
    local known = parse(info)
    if scores[i] then free_share(known) elseif is_special(known) then removed = true end
    if known.unclaimed then unused[#unused + 1] = known.fence end
  end
  call('HDEL', INFO, unpack(ids))
  held = held - call('ZREM', MAIN, unpack(ids))
  if limited > 0 then limited = limited - call('ZREM', TTL, unpack(ids)) end
  return removed
end

local function remove_waiters(ids)
  news = true
  call('HDEL', INFO, unpack(ids))
  queued = queued - call('ZREM', WAITING, unpack(ids))
  call('ZREM', ALIVE, unpack(ids))
end

-- Removes what we have stored about members that another program has removed. Checks only the given ids, or all.
local function forget_removed_members(some)
  local gone = {}
  local function add_removed(ids)
    for _, id in ipairs(ids) do
      if #gone < PAGE and not call('ZSCORE', MAIN, id) and not call('ZSCORE', WAITING, id) then
        gone[#gone + 1] = id
      end
    end
  end
  add_removed(some or call('ZRANGE', TTL, 0, PAGE - 1))
  -- If there are more, they are left to the expiry of the key.
  if not some and call('HLEN', INFO) <= OUT_OF_REACH then add_removed(call('HKEYS', INFO)) end
  if #gone > 0 and forget(gone, {}) then count_anew() end
end

-- Returns expired members. Counts them first, because usually there is none, and counting is cheaper.
local function due(key, members)
  if members == 0 or call('ZCOUNT', key, '-inf', NOW_STAMP) == 0 then return end
  return call('ZRANGEBYSCORE', key, '-inf', NOW_STAMP, 'LIMIT', 0, PAGE)
end

local function expire()
  local over, silent, unused = due(TTL, limited), due(ALIVE, queued), {}
  local removed, count = false, 0
  while over and count < EXPIRED_AT_ONCE do
    removed, count = forget(over, unused) or removed, count + #over
    over = due(TTL, limited)
  end
  local dead = due(MAIN, held)
  while dead and count < EXPIRED_AT_ONCE do
    forget(dead, unused)
    count, dead = count + #dead, due(MAIN, held)
  end
  overdue = over or dead
  if removed then count_anew() end
  return_tokens(unused)
  if silent then remove_waiters(silent) end
end

-- Removes those of the given holders that have expired, if `expire` has left some.
local function expire_these(ids)
  if not overdue then return end
  local renew_by, hold_until, over, unused = call('ZMSCORE', MAIN, unpack(ids)), call('ZMSCORE', TTL, unpack(ids)), {}, {}
  for i, id in ipairs(ids) do
    local ends = math.min(renew_by[i] and micros(renew_by[i]) or FAR, hold_until[i] and micros(hold_until[i]) or FAR)
    if ends <= NOW then over[#over + 1] = id end
  end
  if #over == 0 then return end
  if forget(over, unused) then count_anew() end
  return_tokens(unused)
end

-- Returns the channel of a client's wake-ups, if the client listens. In a cluster every slot has its own channels,
-- because a channel of another slot may belong to another node.
local function channel_of(client)
  local channel = ARGV[1] .. ':wake:' .. client .. ARGV[5]
  local listeners = try('PUBSUB', ARGV[5] ~= '' and 'SHARDNUMSUB' or 'NUMSUB', channel)
  return listeners[2] ~= 0 and channel
end

-- Publishes a message about this name to a client, and returns whether the client listens.
--
-- A message is replicated even if nobody here receives it. A client that is still connected to a former primary, now a
-- replica, would receive it there, and believe that it holds a permit that was not granted. So the script first checks
-- whether the client listens.
local function publish(client, text)
  local channel = channel_of(client)
  if not channel then return false end
  local receivers = try(ARGV[5] ~= '' and 'SPUBLISH' or 'PUBLISH', channel, text)
  return type(receivers) == 'number' and receivers > 0
end

-- Handles a holder that a release has removed: frees what it had, and returns its fence, if its info is known. If
-- another client has released it, its client is notified. That client would notice at its next renewal. But if it knows
-- earlier, it repeats the release after a failover that has lost it.
local function end_released(id, info)
  local client = string.sub(id, 1, 11)
  if client ~= ARGV[2] then publish(client, string.format('%s %d 0 1 0 %s', id, NOW, NAME)) end
  if not info then return end
  local known = parse(info)
  free_share(known)
  return known.fence
end

-- Returns whether the name is shared: another program has members here, or had some in the last minute. Then the
-- releases of that program wake none of our clients, and its clock may be ahead. Every member of ours has an info,
-- which is stored or gathered. But the info of a member that the other program has removed may make up for a member of
-- that program, so a query also looks at the ids.
local function is_shared(asks)
  if seen_at == nil then
    local text = try('GET', FOREIGN)
    seen_at = type(text) == 'string' and tonumber(text) or false
  end
  if not seen_at or NOW - seen_at > SHARED_FOR * 500 then
    if call('HLEN', INFO) + #infos / 2 < held + queued
      or asks and (has_foreign(MAIN, held) or has_foreign(WAITING, queued)) then
      seen_at = NOW
      try('SET', FOREIGN, string.format('%d', NOW), 'PX', SHARED_FOR)
    end
  end
  return seen_at
end

-- Keeps a key until ten seconds after this time. The expiry of a key only grows. To save calls, it is set only if it is
-- more than five seconds short.
local function outlive(key, last)
  local wanted = math.ceil((last - NOW) / 1000) + 10000
  if alone or call('PTTL', key) < wanted - 5000 then call('PEXPIRE', key, wanted) end
end

-- Removes the notification of another program that may have granted this id a permit.
local function forget_notification(id)
  try('DEL', ARGV[1] .. ':acquisition_notification:' .. id)
end

-- Whether the info of a holder is that of a waiter: another program has granted it a permit.
local function is_granted_elsewhere(info)
  return info and string.sub(info, 1, 1) == '-'
end

-- Puts waiters of ours that another program has granted a permit back to their places in the queue. The other program
-- does not know pauses, rates, weights and pins, so `grant` decides again, by our limits. If the waiter's client does
-- not listen, the waiter may be dead. It stays where it is until the time that the other program gave it has passed.
-- Checks only the given holders, or all.
local function take_back(some)
  local ids, back, places = some or held <= PAGE and call('ZRANGE', MAIN, 0, -1) or {}, {}, {}
  if #ids == 0 then return end
  for i, info in ipairs(call('HMGET', INFO, unpack(ids))) do
    local client = string.sub(ids[i], 1, 11)
    if is_granted_elsewhere(info) and (client == ARGV[2] or channel_of(client)) then
      back[#back + 1] = ids[i]
      places[#places + 1] = parse(info)
    end
  end
  if #back == 0 then return end
  -- First the places: the server may be full.
  waiting, alive, news = waiting or {}, alive or {}, true
  for i, known in ipairs(places) do
    local heartbeat = tonumber(string.match(known.text or '', '^(%d+)')) or tonumber(ARGV[4])
    add(waiting, stamp(math.min(known.since or NOW, NOW + 1000000)), back[i])
    add(alive, stamp(NOW + 2 * heartbeat), back[i])
    forget_notification(back[i])
  end
  flush()
  held, queued = held - call('ZREM', MAIN, unpack(back)), call('ZCARD', WAITING)
  seen_at = NOW
  try('SET', FOREIGN, string.format('%d', NOW), 'PX', SHARED_FOR)
end

-- Another client removes this waiter, so its own client must not enqueue it again. That client is notified. If it misses
-- the message, its next query finds a mark: "!" and the id, in ALIVE, until the waiter would have expired. `info` is nil
-- for a waiter of another program.
local function mark_cancelled(id, info)
  local heartbeat = info and tonumber(string.match(parse(info).text or '', '^%S+'))
  if not heartbeat or string.sub(id, 1, 12) == ARGV[2] .. '-' then return end
  -- A server that is full may refuse the mark.
  local marked = try('ZADD', ALIVE, stamp(NOW + 2 * heartbeat), '!' .. id)
  if type(marked) == 'number' then outlive(ALIVE, NOW + 2 * heartbeat) end
  publish(string.sub(id, 1, 11), string.format('%s %d 0 1 0 %s', id, NOW, NAME))
end

-- Returns what to answer for an id that neither holds nor waits.
local function missing(id)
  forget_notification(id)
  local marked_until = call('ZSCORE', ALIVE, '!' .. id)
  return marked_until and micros(marked_until) > NOW and 'cancelled' or 'gone'
end

-- Grants permits to waiters, in order, as long as they fit. Returns whether a newcomer may be granted a permit, because
-- every remaining waiter is out of reach.
local function grant_to_queue()
  local NS, OWN = ARGV[1], ARGV[2] .. '-'
  local passed_over = 0

  local foreign = is_shared()

  -- Wakes the client of a waiter that was granted a permit. The message says what was granted, when, and how long the
  -- client has to claim it. Returns false if nobody received it. In two cases the time to claim it is 0, so that the
  -- client asks first. If another program has members here, its clock may be ahead, and it may remove a permit that is
  -- not claimed yet. If there is a rate, the client must not use a permit before it has claimed it.
  local function wake(id, prefix, fence, slot, claim)
    if foreign or is_metered() then claim = 0 end
    local message = string.format('%s %d %d %d %d %s', id, NOW, fence, slot, claim, NAME)
    if publish(string.sub(id, 1, 11), message) then return true end
    out_of_reach[prefix] = true
    return false
  end

  -- Notifies a member of another program, which waits on a list of its own. The member may be dead, so it must claim
  -- its permit. It has the time until its heartbeat expires, but at least as long as a member of ours. Returns that
  -- time, or nothing if the member cannot be notified.
  local function notify(id)
    -- In a cluster the list is in the slot of the name only if the namespace has a hash tag. In another slot it may be
    -- on this node by chance, and a waiter must not depend on that.
    if ARGV[5] ~= '' and not string.find(NS, '{', 1, true) then return end
    local list = NS .. ':acquisition_notification:' .. id
    local alive_by = call('ZSCORE', ALIVE, id)
    local claim = alive_by and micros(alive_by) - NOW or 0
    claim = math.max(math.min(claim, tonumber(ARGV[4])), tonumber(ARGV[3]))
    if type(try('RPUSH', list, '1')) ~= 'number' then return end
    try('PEXPIRE', list, math.ceil(claim / 1000) + 10000)
    return claim
  end

  -- Grants a permit to a waiter. Returns false if its client cannot be reached.
  local function grant_to(id, prefix, known)
    local terms, claim = terms_of(known.text or ARGV[4] .. ' - '), nil
    if prefix == OWN then
      local slot, fence, valid_for = hold(id, terms, known.share)
      holding[id] = { fence = fence, slot = slot, ttl = terms.ttl }
      add(granted, id, slot)
      add(granted, fence, valid_for)
      return true
    end
    -- An id of ours: the eleven characters of a client, a dash and a number.
    if string.sub(prefix, 12) == '-' and string.match(id, '^%w+%-%d+$') then
      local fence, slot = next_fence(), slot_for(known.share)
      claim = math.min(tonumber(ARGV[3]), terms.heartbeat)
      if not wake(id, prefix, fence, slot, claim) then return false end
      mint(id, terms, fence, known.share, slot, 'unclaimed')
    else
      claim = notify(id)
      if not claim then return false end
      -- This grant takes a token, too. It has no fence, so its token cannot be returned.
      take(ORDINARY, 0, last_known_fence() + 1)
    end
    held = held + 1
    add(main, stamp(NOW + claim), id)
    return true
  end

  local nobody_before = true
  while nobody_before and passed_over < OUT_OF_REACH and queued > passed_over do
    -- Read as many waiters as there is room for. If some are out of reach there may be thousands, so read as many again
    -- as were passed over. For those only the ids are read.
    local size = math.max(math.min(room(), 100), math.min(passed_over, PAGE), 1)
    local last = passed_over + size - 1
    local heads = call('ZRANGE', WAITING, passed_over, last)
    if #heads == 0 then break end
    local known, leaving = passed_over == 0 and call('HMGET', INFO, unpack(heads)) or {}, {}
    for i, id in ipairs(heads) do
      local prefix, info = string.sub(id, 1, 12), known[i]
      nobody_before = fits(1)
      if not nobody_before then break end
      if out_of_reach[prefix] then
        passed_over = passed_over + 1
      else
        if info == nil then info = call('HGET', INFO, id) end
        info = parse(info)
        nobody_before = fits(info.share.weight)
        if not nobody_before then break end
        if grant_to(id, prefix, info) then
          leaving[#leaving + 1] = id
        else
          passed_over = passed_over + 1
        end
      end
    end
    if #leaving > 0 then
      queued = queued - call('ZREM', WAITING, unpack(leaving))
      call('ZREM', ALIVE, unpack(leaving))
    end
  end
  return nobody_before
end

-- Writes the gathered values, and extends the expiry of the keys that it writes, or of all keys.
function flush(all)
  local function write(command, key, list)
    for from = 1, #list, PAGE do
      call(command, key, unpack(list, from, math.min(from + PAGE - 1, #list)))
    end
  end

  -- Keeps a key until ten seconds after its last score, and returns that score; 0 if the key is empty. The score is
  -- read from the key, unless there are no other members: another program may have shortened an expiry that other
  -- members need.
  local function keep(key, highest)
    if not highest then
      highest = call('ZRANGE', key, -1, -1, 'WITHSCORES')[2]
      if not highest then return 0 end
      highest = micros(highest)
    end
    outlive(key, highest)
    return highest
  end

  write('HSET', INFO, infos)
  if last_fence then call('SET', FENCE, string.format('%d', last_fence)) end
  if max then call('SET', MAX, max) end
  if limits and limits.changed then
    local set = limits.changed == 'if possible' and try or call
    limits.changed = nil
    if limits.pinned or limits.paused or limits.extra > 0 or limits.interval then
      local numbers, keys = {}, { 'pinned', 'declared', 'paused', 'extra', 'count', 'period', 'burst', 'full_at', 'returns' }
      for i, key in ipairs(keys) do
        numbers[i] = limits[key] and string.format('%d', limits[key]) or '-'
      end
      local text = table.concat(numbers, ' ')
      set('SET', LIMITS, text .. '\n' .. (limits.by or '') .. '\n' .. (limits.reason or ''))
    else
      call('DEL', LIMITS)
    end
  end
  write('ZADD', MAIN, main)
  if held >= TABLE_FROM and held_before < TABLE_FROM then
    call('ZADD', MAIN, 0, LONG)
    call('ZREM', MAIN, LONG)
  end
  local held_until, alive_until = 0, 0
  if all or #main > 0 then held_until = keep(MAIN, alone and NOW + longest) end
  if all or #ttls > 0 then
    write('ZADD', TTL, ttls)
    keep(TTL)
  end
  if waiting then write('ZADD', WAITING, waiting) end
  if all or alive then
    if alive then write('ZADD', ALIVE, alive) end
    alive_until = keep(ALIVE)
    -- A place in the queue must live as long as its waiter.
    if alive_until > 0 then outlive(WAITING, alive_until) end
  end
  -- The info of an id must live as long as the id.
  local last = math.max(held_until, alive_until)
  if last > 0 then
    outlive(INFO, last)
    if numbered then outlive(SLOTS, last) end
  end
  alone = false
  main, ttls, infos, max, waiting, alive = {}, {}, {}, nil, nil, nil
end

-- Like `grant_to_queue`, but also for a queue that is empty or whose first waiter cannot fit.
local function grant()
  if queued == 0 then return true end
  if not fits(1) then return false end
  -- Waiters that were only gathered must be found in the queue.
  if waiting then flush() end
  return grant_to_queue()
end

-- Returns the time until the first waiter is granted a permit, if it is the sender's and waits only for a token. That
-- is when enough tokens have arrived to be worth a sweep (`Rate::worth_waiting_for`). If the first waiter belongs to
-- another client, and the time may have changed, this function notifies that client. If that client cannot be reached,
-- it notifies the client of the next waiter that can.
local function next_token()
  if not is_metered() or has_token() then return end
  local heads, queried = call('ZRANGE', WAITING, 0, 9), {}
  local weight = parse(call('HGET', INFO, heads[1])).share.weight
  if weight > room() then return end
  local interval = limits.interval
  local more = math.min(math.floor(4000 / interval), math.floor((limits.burst - 1) / 2), queued - 1)
  local delay = limits.full_at + interval - all_tokens() + more * interval - NOW
  if string.sub(heads[1], 1, 12) == ARGV[2] .. '-' then return delay end
  for _, id in ipairs(news and heads or {}) do
    local client = string.sub(id, 1, 11)
    if not queried[client] and string.match(id, '^%w+%-%d+$') then
      queried[client] = true
      if publish(client, string.format('%s %d 0 0 %d %s', id, NOW, delay, NAME)) then return end
    end
  end
end

function is_gathered()
  return #main > 0 or #infos > 0 or max or alive or limits and limits.changed
end

-- Returns what the sender may expect of the name. That decides which script it tries next.
-- - "room": nobody waits, and units are free; "full": nobody waits
-- - "queue": somebody waits
-- - "special": the small scripts do not serve the name as it is, or its limits were not read
-- - "shared": the same, because another program has members here, or had some in the last minute
local function outlook()
  if queued > 0 and is_shared() then return 'shared' end
  if not limits or limits.pinned or limits.paused or limits.extra > 0 or limits.interval then return 'special' end
  if queued > 0 then return limited > 0 and 'special' or 'queue' end
  return held < capacity and 'room' or 'full'
end

-- Writes what is left to write, and returns the answer.
local function finish()
  if is_gathered() then flush() end
  local delay = -1
  local token = queued > 0 and next_token()
  if queued > 0 then
    local first = math.huge
    local function consider(score)
      if score then first = math.min(first, micros(score)) end
    end
    if held > 0 then consider(call('ZRANGE', MAIN, 0, 0, 'WITHSCORES')[2]) end
    if limited > 0 then consider(call('ZRANGE', TTL, 0, 0, 'WITHSCORES')[2]) end
    local head = call('ZRANGE', WAITING, 0, 0)[1]
    if head then consider(call('ZSCORE', ALIVE, head)) end
    if first < math.huge then delay = math.max(first - NOW, 1) end
  end
  add(outcomes, delay, outlook())
  if token then outcomes[#outcomes + 1] = math.max(token, 1) end
  for i = 1, #granted do outcomes[#outcomes + 1] = granted[i] end
  return outcomes
end

-- Enqueue and renew share the functions below, which serve ids that ask again.

-- Answers for an id that was granted a permit earlier in this same call.
local function hold_again(id, terms)
  local fence, slot, ttl = holding[id].fence, holding[id].slot, holding[id].ttl
  renew(id, terms)
  return slot, fence, math.min(terms.heartbeat, ttl or terms.heartbeat)
end

-- Returns how long a holder may still hold, by its score in TTL. If another program has let the whole key expire, the
-- score is restored.
local function ttl_left(id, info, hold_until)
  if hold_until then return micros(hold_until) - NOW end
  local ttl = info.fence and tonumber(string.match(info.text, '^%S+ (%S+)'))
  if not ttl then return end
  local left = math.max(info.since + ttl - NOW, 0)
  add(ttls, stamp(NOW + left), id)
  limited = limited + 1
  return left
end

-- Renews a holder. `info` is its parsed info, `hold_until` its score in TTL. If another program has removed its info, it
-- gets a new fence.
local function renew_holder(id, info, hold_until, terms)
  local fence, slot, left = info.fence, info.slot, ttl_left(id, info, hold_until)
  if not fence then
    fence, slot, left = next_fence(), slot_for(info.share), terms.ttl
    mint(id, terms, fence, info.share, slot)
    forget_notification(id)
  elseif info.unclaimed then
    add(infos, id, field_of(fence, info.share.weight, slot, 0) .. string.format(' %d ', info.since) .. info.text)
  end
  numbered = numbered or slot > 0
  renew(id, terms)
  return slot, fence, math.min(terms.heartbeat, left or terms.heartbeat)
end

-- The place of a waiter is kept for two leases: `Terms::waiter_lease` says why.
local function renew_waiter(id, terms)
  alive = alive or {}
  add(alive, stamp(NOW + 2 * terms.heartbeat), id)
end

-- Removes everything that is known about the name.
local function forget_name()
  call('DEL', MAIN, TTL, MAX, WAITING, ALIVE, FENCE, INFO, LIMITS, SLOTS, FOREIGN)
  capacity, limits, last_fence, max = nil, nil, nil, nil
end

-- Returns the place of a new waiter. Two waiters never have the same score. A last score that is more than a second
-- ahead comes from another program's clock, and is ignored.
local function next_place()
  if place then
    place = place + 1
  else
    -- This call fails here, before anything is written, if the key has another type.
    call('ZCARD', ALIVE)
    local tail = call('ZRANGE', WAITING, -1, -1, 'WITHSCORES')[2]
    place = NOW
    if tail and micros(tail) < NOW + 1000000 then place = math.max(NOW, micros(tail) + 1) end
  end
  return place
end

-- Removes expired members, and grants the permits that this frees.
local function tidy(asks)
  if not expired then
    expired = true
    -- Clients ask again and again, so a query also cleans up what another program has left behind.
    if limited > held or asks and call('HLEN', INFO) > held + queued then forget_removed_members() end
    if held > 0 and is_shared(asks) then take_back() end
    expire()
    if asks then
      read_capacity()
      -- See `count_anew`. Clients ask again and again, so a query corrects the counts.
      if limits.extra > 0 and held <= PAGE then count_anew() end
    end
  end
  return grant()
end

-- Reads what every transition needs. It is a separate function because a Lua function can capture no more than sixty
-- variables.
local function begin()
  local declares = ARGV[8]
  NAME, DECLARED, DECLARES = ARGV[6], ARGV[7], string.sub(declares, 1, 1) == '1'
  if #declares > 1 then
    local is_new, count, period, burst = string.match(declares, '^%d (%d) (%d+) (%d+) (%d+)$')
    RATE = { is_new = is_new == '1', count = count, period = period, burst = burst }
  end
  MAIN, TTL, MAX, WAITING, ALIVE, FENCE, INFO, LIMITS, SLOTS, FOREIGN = unpack(KEYS)
  held, limited, queued = call('ZCARD', MAIN), call('ZCARD', TTL), call('ZCARD', WAITING)
  alone = held == 0 and queued == 0
  held_before = held
end

-- Every command runs as expire, grant, the command, grant, except for the steps that `machine.rs` shows to be
-- unnecessary.
local function serve()
  begin()
  local section = 9
  while section < #ARGV do
    local transition, first = ARGV[section], section + 2
    local last = section + 1 + ARGV[section + 1]
    section = last + 1
    -- TRANSITIONS
  end
  return finish()
end

local served, result = pcall(serve)
if not served then
  -- Keep the waiters that were granted a permit, or enqueued, before the error.
  if #main > 0 or waiting then pcall(flush) end
  if type(result) ~= 'table' then
    -- Older servers put the location before the error.
    result = redis.error_reply(string.match(result, '%u%u%u+ .*') or result)
  end
end
return result

end)()
