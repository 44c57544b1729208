-- The fair semaphore, spelled in Lua: the part that every transition shares. `machine.rs` has the argument.
--
-- KEYS  1 main     ZSET    holder -> renew_by
--       2 ttl      ZSET    holder -> hold_until
--       3 max      STRING  the capacity
--       4 waiting  ZSET    waiter -> when it was enqueued
--       5 alive    ZSET    waiter -> alive_by
--       6 fence    STRING  the last fence; never expires
--       7 info     HASH    id -> "fence since heartbeat ttl label" (microseconds; "-" is none)
-- ARGV  1 namespace, 2 name, 3 the sender's client id, 4 confirm_within and 5 the heartbeat for members of
--       other programs, in microseconds; from 6 on what the transition says
-- Also, by their names alone: {ns}:wake:{client} (PUBLISH), and {ns}:acquisition_notification:{id} of members of
-- other programs, or of ours that such a program has granted.
-- Result  flat: delay until the next expiry (-1: none), the number of own waiters granted, for each of them
--       id, slot number, fence, valid_for; then for each id asked about its outcome, as the transition says
--
-- Lua does not roll back, so everything is read before anything is written: a key of the wrong type ends the
-- script while nothing has happened.
local MAIN, TTL, MAX, WAITING, ALIVE, FENCE, INFO = unpack(KEYS)
local NS, NAME, CLIENT = ARGV[1], ARGV[2], ARGV[3]
local CONFIRM_WITHIN, FOREIGN_HEARTBEAT = tonumber(ARGV[4]), tonumber(ARGV[5])
local OWN = CLIENT .. '-'

local function now()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local NOW = now()

-- Scores are seconds with microseconds; `tostring` and `..` would keep too few digits.
local function stamp(micros)
  return string.format('%d.%06d', math.floor(micros / 1000000), micros % 1000000)
end

-- The score of so long from now, formatted once a script.
local stamps = {}
local function stamp_in(span)
  local known = stamps[span]
  if not known then
    known = stamp(NOW + span)
    stamps[span] = known
  end
  return known
end

local function micros(score)
  return math.floor(tonumber(score) * 1000000 + 0.5)
end

local NOW_STAMP = stamp(NOW)

-- At most this many ids in one call: `unpack` ends at 8000.
local PAGE = 1000

local function span(text)
  if text ~= '-' then return tonumber(text) end
end

-- What is known of an id: its fence if it was confirmed, and what it asked for.
local function parse(info)
  if not info then return {} end
  local fence, since, heartbeat, ttl, label = string.match(info, '^(%S+) (%S+) (%S+) (%S+) ?(.*)$')
  return { fence = span(fence or '-'), since = since, heartbeat = span(heartbeat or '-'),
    ttl = span(ttl or '-'), label = label or '' }
end

local SINCE = string.format('%d', NOW)

local function digits(number)
  return number and string.format('%d', number) or '-'
end

-- `terms` are the heartbeat, the TTL and the label, as `describe_terms` spells them.
local function describe(fence, terms)
  return digits(fence) .. terms
end

local function describe_terms(heartbeat, ttl, label)
  return ' ' .. SINCE .. ' ' .. digits(heartbeat) .. ' ' .. digits(ttl) .. ' ' .. label
end

-- What is to be written, gathered so that each key is written once a script.
local writes = { main = {}, ttl = {}, waiting = {}, alive = {}, info = {} }
local granted = {}
local holding = {}

-- Who holds and who waits. What is read only now and then is read when it is needed, but always before
-- anything is written to that key.
local held = redis.call('ZCARD', MAIN)
local queued = redis.call('ZCARD', WAITING)
local capacity, last_fence

local function read_capacity()
  if not capacity then capacity = tonumber(redis.call('GET', MAX) or 0) end
  return capacity
end

local function mint()
  if not last_fence then last_fence = tonumber(redis.call('GET', FENCE) or 0) end
  last_fence = math.max(last_fence + 1, NOW)
  writes.fence = true
  return last_fence
end

local function add(list, a, b)
  list[#list + 1] = a
  list[#list + 1] = b
end

-- The hash is the first to be written: it alone may not have been read before.
local function forget(ids)
  redis.call('HDEL', INFO, unpack(ids))
  held = held - redis.call('ZREM', MAIN, unpack(ids))
  redis.call('ZREM', TTL, unpack(ids))
end

local function leave(ids)
  redis.call('HDEL', INFO, unpack(ids))
  queued = queued - redis.call('ZREM', WAITING, unpack(ids))
  redis.call('ZREM', ALIVE, unpack(ids))
end

local function due(key)
  return redis.call('ZRANGEBYSCORE', key, '-inf', NOW_STAMP, 'LIMIT', 0, PAGE)
end

local function expire()
  local over = due(TTL)
  local silent = queued > 0 and due(ALIVE) or {}
  while #over > 0 do
    forget(over)
    over = due(TTL)
  end
  while held > 0 do
    local dead = due(MAIN)
    if #dead == 0 then break end
    forget(dead)
  end
  if #silent > 0 then leave(silent) end
end

-- Makes `id` a holder who is told so in the reply, and confirmed by that. Answers its slot number, its fence
-- and how long that is good for, as do the two functions that follow.
local function hold(id, heartbeat, ttl, terms)
  held = held + 1
  local fence = mint()
  add(writes.main, stamp_in(heartbeat), id)
  if ttl then add(writes.ttl, stamp_in(ttl), id) end
  add(writes.info, id, describe(fence, terms))
  return held, fence, math.min(heartbeat, ttl or heartbeat)
end

-- One that this very script has granted a permit asks for it, too.
local function hold_again(id, heartbeat)
  local fence, ttl = holding[id].fence, holding[id].ttl
  add(writes.main, stamp_in(heartbeat), id)
  return held, fence, math.min(heartbeat, ttl or heartbeat)
end

-- Tells a waiter of another client that it was granted a permit; false if nobody heard it.
local function wake(id)
  local client = string.match(id, '^(%w+)%-%d+$')
  if client and #client == 11 then
    local heard = redis.pcall('PUBLISH', NS .. ':wake:' .. client, id .. ' ' .. NAME)
    return type(heard) == 'number' and heard > 0, CONFIRM_WITHIN
  end
  -- A member of another program waits on a list of its own, and needs no confirming by our rules.
  local list = NS .. ':acquisition_notification:' .. id
  local heard = redis.pcall('RPUSH', list, '1')
  if type(heard) ~= 'number' then return false end
  redis.pcall('PEXPIRE', list, math.ceil(FOREIGN_HEARTBEAT / 1000) + 10000)
  return true, FOREIGN_HEARTBEAT
end

local function grant()
  if queued == 0 then return end
  local capacity, passed_over, out_of_reach = read_capacity(), 0, {}
  while held < capacity and passed_over < PAGE and queued > passed_over do
    local last = passed_over + math.min(capacity - held, 100) - 1
    local heads = redis.call('ZRANGE', WAITING, passed_over, last)
    if #heads == 0 then break end
    local infos = redis.call('HMGET', INFO, unpack(heads))
    local leaving = {}
    for i, id in ipairs(heads) do
      local info = parse(infos[i])
      if string.sub(id, 1, #OWN) == OWN then
        local heartbeat, ttl = info.heartbeat or FOREIGN_HEARTBEAT, info.ttl
        local terms = describe_terms(heartbeat, ttl, info.label or '')
        local slot, fence, valid_for = hold(id, heartbeat, ttl, terms)
        holding[id] = { fence = fence, ttl = ttl }
        granted[#granted + 1] = { id, slot, fence, valid_for }
        leaving[#leaving + 1] = id
      else
        local client = string.match(id, '^(%w+)%-') or id
        local heard, claim = false, nil
        if not out_of_reach[client] then heard, claim = wake(id) end
        if heard then
          held = held + 1
          claim = math.min(claim, info.heartbeat or claim)
          add(writes.main, stamp_in(claim), id)
          if infos[i] then
            add(writes.info, id, describe(nil, describe_terms(info.heartbeat, info.ttl, info.label)))
          end
          leaving[#leaving + 1] = id
        else
          out_of_reach[client] = true
          passed_over = passed_over + 1
        end
      end
    end
    if #leaving > 0 then
      queued = queued - redis.call('ZREM', WAITING, unpack(leaving))
      redis.call('ZREM', ALIVE, unpack(leaving))
    end
  end
end

-- How long a holder may still hold, by its score in TTL. If another program has let the whole key expire, the
-- score is put back.
local function ttl_left(id, info, hold_until)
  if hold_until then return micros(hold_until) - NOW end
  if not (info.fence and info.ttl) then return end
  local left = math.max(info.since + info.ttl - NOW, 0)
  add(writes.ttl, stamp_in(left), id)
  return left
end

-- Another program may have granted it once, and told it so.
local function forget_notification(id)
  redis.pcall('DEL', NS .. ':acquisition_notification:' .. id)
end

-- Claims a permit, or renews the claim. `info` is what is known of it, `hold_until` its score in TTL.
local function confirm(id, info, hold_until, heartbeat, ttl, terms)
  local fence = info.fence
  local left = ttl_left(id, info, hold_until)
  if not fence then
    fence = mint()
    left = ttl
    if ttl then add(writes.ttl, stamp_in(ttl), id) end
    add(writes.info, id, describe(fence, terms))
    forget_notification(id)
  end
  add(writes.main, stamp_in(heartbeat), id)
  return held, fence, math.min(heartbeat, left or heartbeat)
end

-- What is answered for the ids that were asked about, in order.
local outcomes = {}
local function answer(tag, slot, fence, valid_for)
  local n = #outcomes
  outcomes[n + 1], outcomes[n + 2], outcomes[n + 3], outcomes[n + 4] = tag, slot or 0, fence or 0, valid_for or 0
end

-- An expiry only ever grows. Setting it is saved while it is still five seconds behind.
local function outlive(key, last)
  local wanted = math.ceil((last - NOW) / 1000) + 10000
  if redis.call('PTTL', key) < wanted - 5000 then redis.call('PEXPIRE', key, wanted) end
end

-- Lets a key live until ten seconds after its last score, which it answers; 0 if there is none. Not the last that
-- we wrote: another program may have shortened what others need.
local function keep(key)
  local highest = redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2]
  if not highest then return 0 end
  outlive(key, micros(highest))
  return micros(highest)
end

local function write_scores(key, list)
  for from = 1, #list, PAGE do
    redis.call('ZADD', key, unpack(list, from, math.min(from + PAGE - 1, #list)))
  end
end

-- Writes what was gathered, and sees to the life of the keys that it writes, or of all.
local function flush(all)
  for from = 1, #writes.info, PAGE do
    redis.call('HSET', INFO, unpack(writes.info, from, math.min(from + PAGE - 1, #writes.info)))
  end
  if writes.fence then redis.call('SET', FENCE, string.format('%d', last_fence)) end
  if writes.max then redis.call('SET', MAX, writes.max) end
  write_scores(MAIN, writes.main)
  write_scores(TTL, writes.ttl)
  write_scores(WAITING, writes.waiting)
  write_scores(ALIVE, writes.alive)
  local held_until, alive_until = 0, 0
  if all or #writes.main > 0 then held_until = keep(MAIN) end
  if all or #writes.ttl > 0 then keep(TTL) end
  if all or #writes.alive > 0 then alive_until = keep(ALIVE) end
  -- A place in the queue is good for as long as its waiter is, and what is known of an id for as long as the id.
  if alive_until > 0 then outlive(WAITING, alive_until) end
  local last = math.max(held_until, alive_until)
  if last > 0 then outlive(INFO, last) end
  writes = { main = {}, ttl = {}, waiting = {}, alive = {}, info = {} }
end

-- Writes, and answers in the form that every transition has.
local function finish()
  flush()
  local delay = -1
  if queued > 0 then
    local first = math.huge
    for _, key in ipairs({ MAIN, TTL }) do
      local lowest = redis.call('ZRANGE', key, 0, 0, 'WITHSCORES')
      if lowest[2] then first = math.min(first, micros(lowest[2])) end
    end
    local head = redis.call('ZRANGE', WAITING, 0, 0)[1]
    local alive_by = head and redis.call('ZSCORE', ALIVE, head)
    if alive_by then first = math.min(first, micros(alive_by)) end
    if first < math.huge then delay = math.max(first - NOW, 1) end
  end
  local result = { delay, #granted }
  for _, one in ipairs(granted) do
    for field = 1, 4 do result[#result + 1] = one[field] end
  end
  for _, field in ipairs(outcomes) do result[#result + 1] = field end
  return result
end
