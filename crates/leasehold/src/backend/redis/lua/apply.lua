-- The fair semaphore: serves one name after the other. `machine.rs` has the argument.
--
-- Most requests are one acquire or one release of a name without waiters, or the query of a waiter for which nothing
-- has changed. These take a fast path here. The machine (`machine.lua`) handles everything else. Defining a function
-- costs time, even if the function is not called. So the machine is created only when it is first needed.
--
-- KEYS  of each name
--       1 main     ZSET    holder -> renew_by
--       2 ttl      ZSET    holder -> hold_until
--       3 max      STRING  the capacity
--       4 waiting  ZSET    waiter -> when it was enqueued
--       5 alive    ZSET    waiter -> alive_by; and marks of cancelled waiters: see `mark_cancelled`
--       6 fence    STRING  the last fence; never expires
--       7 info     HASH    id -> "fence since heartbeat ttl label" (microseconds; "-" is none). If the permit is not
--                          ordinary, its weight and slot number follow the fence: see `field_of`
--       8 limits   STRING  the pin, the pause, the rate and the extra weight, if any: see `read_capacity`. Never expires;
--                          usually missing
--       9 slots    STRING  a bit for each slot number that is taken
--      10 foreign  STRING  when a member of another program was last seen here, in microseconds. Expires a minute later
-- ARGV  1 namespace
--       2 client             the sender
--       3 confirm_within     in microseconds
--       4 foreign_heartbeat  of members of other programs, in microseconds
--       5 channel            the end of the wake-up channels: "", or in a cluster ":" and a hash tag of the slot
--       and for each name
--       6 name
--       7 capacity           the newest declaration of the sender; 0 if it has declared none
--       8 declares           1 if this declaration is new; 0 if it counts only where no capacity is known. If the sender also
--                            declares a rate, these follow: 1 if the rate is new, else 0; the count; the period in
--                            microseconds; the burst
--       9 arguments          the number of arguments that follow for this name
--       and for each transition of this name
--      10 transition         its name
--      11 arguments          the number of arguments that follow
--       and the arguments of the transition
-- Also, without being declared in KEYS: the channels of wake-ups (see `publish`), and {ns}:acquisition_notification:{id} of
-- members of other programs, or of ours that such a program has granted a permit. In a cluster these lists are in other
-- slots, unless the namespace has a hash tag. Without one, their members cannot be notified, and are passed over.
-- Result  the server's time in microseconds, or 0 if the clock was not read; and for each name one flat list, or an error,
--       which does not affect the other names. The list has: for each id its outcome, as the transition says; the delay until
--       the next expiry (-1: none); 1 if another program has members here, or had some in the last minute, else 0; the delay until the next token, if the
--       first waiter is the sender's and waits only for a token; for each waiter of the sender that was granted a permit its
--       id, slot number, fence and valid_for.
--
-- Lua does not roll back, so everything is read before anything is written. A key of the wrong type ends the work on its
-- name before anything has changed.
local call, try = redis.call, redis.pcall
local NOW

local function now()
  local time = call('TIME')
  return time[1] * 1000000 + time[2]
end

-- Scores are seconds with microseconds. They are formatted as text here: Redis would print a number with seventeen
-- digits, which takes longer than the command itself.
local function stamp(micros)
  return string.format('%d.%06d', math.floor(micros / 1000000), micros % 1000000)
end

-- Redis stores a small collection as a list, and searches it from the beginning. From this many members on, a table is
-- faster. A single member of more than 64 bytes makes Redis convert the list to a table, permanently.
local TABLE_FROM = 24

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

local function machine()
-- MACHINE
end

-- The function of the machine that serves one name.
local serve

local results, at, keys = { 0 }, 6, 0
while at <= #ARGV do
  local outcomes, section, last = {}, at + 4, at + 3 + ARGV[at + 3]
  local main, ttls, waiting, info = KEYS[keys + 1], KEYS[keys + 2], KEYS[keys + 4], KEYS[keys + 7]
  local transition, delay = ARGV[section], -1

  -- The number of existing keys usually tells which of them exist.
  local there = transition == 'enqueue' and call('EXISTS', main, ttls, waiting)
  if there or transition == 'release' and try('ZCARD', waiting) == 0 then
    -- Holders release, and nobody waits for their permits. So expired holders do not matter.
    while section < last and ARGV[section] == 'release' do
      local known, stop = ARGV[section + 2], section + 1 + ARGV[section + 1]
      if known ~= 'held' and known ~= 'limited' then break end
      -- First the hash and the TTLs: if one of them has the wrong type, nothing has changed yet.
      if type(try('HDEL', info, unpack(ARGV, section + 3, stop))) ~= 'number' then break end
      if known == 'limited' and type(try('ZREM', ttls, unpack(ARGV, section + 3, stop))) ~= 'number' then break end
      local removed, n = try('ZREM', main, ARGV[section + 3]), #outcomes
      if type(removed) ~= 'number' then break end
      outcomes[n + 1] = removed == 1 and 'holder' or 'nobody'
      for id = section + 4, stop do
        outcomes[n + id - section - 2] = call('ZREM', main, ARGV[id]) == 1 and 'holder' or 'nobody'
      end
      section = stop + 1
    end

    -- If there is room for all ids, expired holders do not matter: they could only make more room.
    if section < last and ARGV[section] == 'enqueue' then
      local heartbeat, ttl, stop = tonumber(ARGV[section + 3]), tonumber(ARGV[section + 4]), section + 1 + ARGV[section + 1]
      local first = section + 6
      local new, texts = stop - first + 1, call('MGET', KEYS[keys + 3], KEYS[keys + 6], KEYS[keys + 8])
      local capacity, fence = tonumber(texts[1]), tonumber(texts[2])
      there = there or call('EXISTS', main, ttls)
      local held = there == 0 and 0 or try('ZCARD', main)
      local known = held == 0 and 0 or 1
      local limited = there == known and 0 or try('ZCARD', ttls)
      if limited ~= 0 then known = known + 1 end
      -- `there == known` means that nobody waits. Either every holder has a TTL or none has. Otherwise the TTL of a
      -- holder that another program has removed may be left.
      if type(held) == 'number' and there == known and limited == (ttl and held or 0) and not texts[3]
        and #ARGV[section + 2] == 1 and #ARGV[at + 2] == 1
        and (texts[1] == ARGV[at + 1] or ARGV[at + 2] == '0' and capacity and capacity % 1 == 0 and capacity < 4294967296)
        and held + new <= capacity
        and fence and fence >= 0 and fence < 9007199254740000 and fence % 1 == 0
        and (held >= TABLE_FROM or held + new < TABLE_FROM) then
        NOW = NOW or now()
        local members, ends, infos = {}, {}, {}
        local renew_by, hold_until = stamp(NOW + heartbeat), ttl and stamp(NOW + ttl)
        -- The same with more digits: see TABLE_FROM.
        local format = held + new < TABLE_FROM and '%d %d %s %s %s' or '%d %048d %s %s %s'
        fence = math.max(fence, NOW - 1)
        for i = 1, new do
          local id = ARGV[first + i - 1]
          members[2 * i - 1], members[2 * i] = renew_by, id
          if ttl then ends[2 * i - 1], ends[2 * i] = hold_until, id end
          infos[2 * i - 1] = id
          infos[2 * i] = string.format(format, fence + i, NOW, ARGV[section + 3], ARGV[section + 4], ARGV[section + 5])
        end
        -- An id that already holds asks again: the machine handles that.
        local scores = new > 1 and held > 0 and call('ZMSCORE', main, unpack(ARGV, first, stop)) or {}
        local is_new = true
        for i = 1, #scores do is_new = is_new and not scores[i] end
        if is_new and try('ZADD', main, 'NX', unpack(members)) == new then
          if (not ttl or type(try('ZADD', ttls, unpack(ends))) == 'number')
            and type(try('HSET', info, unpack(infos))) == 'number' then
            call('SET', KEYS[keys + 6], string.format('%d', fence + new))
            -- The expiry of a key only grows. To save calls, it is set only if it is more than five seconds short.
            local wanted = math.ceil(heartbeat / 1000) + 10000
            if held == 0 or call('PTTL', main) < wanted - 5000 then call('PEXPIRE', main, wanted) end
            if held == 0 or call('PTTL', info) < wanted - 5000 then call('PEXPIRE', info, wanted) end
            if ttl then
              local wanted = math.ceil(ttl / 1000) + 10000
              if call('PTTL', ttls) < wanted - 5000 then call('PEXPIRE', ttls, wanted) end
            end
            local n, valid_for = #outcomes, ttl and math.min(heartbeat, ttl) or heartbeat
            for i = 1, new do
              outcomes[n + 1], outcomes[n + 2], outcomes[n + 3], outcomes[n + 4] = 'held', 0, fence + i, valid_for
              n = n + 4
            end
            section = stop + 1
          else
            call('ZREM', main, unpack(ARGV, first, stop))
            try('ZREM', ttls, unpack(ARGV, first, stop))
          end
        end
      end
    end
  elseif transition == 'renew' and last == section + 4 then
    -- A waiter asks, and nothing is due: nobody has expired, no permit is free, and no other program has members here.
    local id, rank = ARGV[last], try('ZRANK', waiting, ARGV[last])
    local held, texts = try('ZCARD', main), call('MGET', KEYS[keys + 3], KEYS[keys + 8], KEYS[keys + 10])
    local capacity, queued = tonumber(texts[1]), type(rank) == 'number' and call('ZCARD', waiting)
    -- The info of a member that another program has removed may make up for a member of that program, so the number of
    -- infos is not enough.
    if queued and type(held) == 'number' and capacity and not texts[2] and not texts[3] and held > 0 and held >= capacity
      and try('ZCARD', ttls) == 0 and try('HLEN', info) == held + queued
      and not has_foreign(main, held) and not has_foreign(waiting, queued) then
      NOW = NOW or now()
      local ends = tonumber(call('ZRANGE', main, 0, 0, 'WITHSCORES')[2])
      local alive, second = KEYS[keys + 5], NOW / 1000000
      if ends > second and ends < second + 3155760000 and try('ZCOUNT', alive, '-inf', second) == 0 then
        local waiter_lease = 2 * ARGV[section + 2]
        call('ZADD', alive, stamp(NOW + waiter_lease), id)
        local wanted = math.ceil(waiter_lease / 1000) + 10000
        for key = keys + 4, keys + 7 do
          if key ~= keys + 6 and call('PTTL', KEYS[key]) < wanted - 5000 then call('PEXPIRE', KEYS[key], wanted) end
        end
        local head = tonumber(call('ZSCORE', alive, rank == 0 and id or call('ZRANGE', waiting, 0, 0)[1]) or ends)
        delay = math.max(math.floor(math.min(ends, head) * 1000000 + 0.5) - NOW, 1)
        outcomes, section = { 'waiting', rank, 0, 0 }, last + 1
      end
    end
  end

  if section <= last then
    NOW = NOW or now()
    serve = serve or machine()
    results[#results + 1] = serve(at, keys, section, outcomes)
  else
    local n = #outcomes
    outcomes[n + 1], outcomes[n + 2] = delay, 0
    results[#results + 1] = outcomes
  end
  at, keys = last + 1, keys + 10
end
results[1] = NOW or 0
return results
