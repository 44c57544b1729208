-- Grants a permit or a place in the queue to each id, in order.
--
-- ARGV    1 wait       1 or 0. If a permit is not ordinary, its weight follows, and 1 if it gets a slot number, else 0
--         2 heartbeat  in microseconds
--         3 ttl        in microseconds; "-": none
--         4 label
--         5 ids        from here on
-- Result  four for each id: "held", slot number (0: none), fence, valid_for | "waiting", waiters ahead, 0, 0 |
--         "full", 0, 0, 0 | "heavy", the capacity, 0, 0
local wait, ids, share = string.sub(ARGV[first], 1, 1) == '1', first + 4, ORDINARY
if #ARGV[first] > 1 then
  local weight, number = string.match(ARGV[first], '^%d (%d+) (%d)$')
  share = { weight = tonumber(weight), numbered = number == '1' }
end
local weight = share.weight
local terms = terms_of(ARGV[first + 1] .. ' ' .. ARGV[first + 2] .. ' ' .. ARGV[first + 3])
local scores, places
local function read_members()
  expire_these({ unpack(ARGV, ids, last) })
  scores = held > 0 and call('ZMSCORE', MAIN, unpack(ARGV, ids, last)) or {}
  places = queued > 0 and call('ZMSCORE', WAITING, unpack(ARGV, ids, last)) or {}
end
read_members()
-- A refused acquire declares nothing.
local known = false
for i = 1, last - ids + 1 do known = known or scores[i] or places[i] or holding[ARGV[ids + i - 1]] end
local declared = read_capacity()
if DECLARES and not limits.pinned then declared = tonumber(DECLARED) end
local is_refused = not known and weight > declared
-- Declare first: if that makes room, the room belongs to earlier waiters.
if not is_refused then
  if DECLARES or limits.declared == 0 then declare(DECLARED) end
  if limits.is_unknown then max = DECLARED end
  if RATE and (RATE.is_new or not limits.interval) then set_rate(RATE.count, RATE.period, RATE.burst) end
end
local nobody_before = true
if is_refused or queued > 0 then
  nobody_before = tidy()
elseif limited > held then
  forget_removed_members()
else
  local over = due(TTL, limited)
  if over then forget_removed_members(over) end
end
read_members()

for i = 1, last - ids + 1 do
  local id = ARGV[ids + i - 1]
  if not is_refused and not expired and (scores[i] or not fits(weight)) then
    nobody_before = tidy()
    read_members()
  end
  if scores[i] and not holding[id] and is_granted_elsewhere(call('HGET', INFO, id)) then
    take_back({ id })
    nobody_before = grant()
    read_members()
  end
  if holding[id] then
    answer('held', hold_again(id, terms))
  elseif scores[i] then
    answer('held', renew_holder(id, parse(call('HGET', INFO, id)), call('ZSCORE', TTL, id), terms))
  elseif places[i] then
    renew_waiter(id, terms)
    answer('waiting', call('ZRANK', WAITING, id))
  elseif is_refused or weight > capacity then
    answer('heavy', is_refused and declared or capacity)
  elseif nobody_before and fits(weight) then
    answer('held', hold(id, terms, share))
  elseif wait then
    waiting = waiting or {}
    add(waiting, stamp(next_place()), id)
    renew_waiter(id, terms)
    local field = '-'
    if share ~= ORDINARY then field = string.format('-/%d/%d/0', weight, share.numbered and 1 or 0) end
    -- The info has the place, so that `take_back` finds it.
    local since = string.format(held + queued < TABLE_FROM and ' %d ' or ' %048d ', place)
    add(infos, id, field .. since .. terms.text)
    answer('waiting', queued)
    queued, nobody_before = queued + 1, false
  else
    answer('full')
  end
end
