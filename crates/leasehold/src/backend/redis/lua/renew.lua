-- Renews holders and waiters, and claims permits that were granted with a wake-up. Never moves a waiter.
--
-- ARGV    1 heartbeat  in microseconds
--         2 ttl        in microseconds; "-": none
--         3 ids        from here on
-- Result  four for each id: "held", slot number, fence, valid_for | "waiting", waiters ahead, 0, 0 | "gone", 0, 0, 0 |
--         "cancelled", 0, 0, 0: another client has removed the waiter
tidy('asks')
local terms, ids = terms_of(ARGV[first] .. ' ' .. ARGV[first + 1] .. ' '), first + 2
local renew_by, places, hold_until, known
local function read_members()
  expire_these({ unpack(ARGV, ids, last) })
  -- `ZADD XX CH` answers 0 for a member that keeps its score, so the scores are read first.
  renew_by = call('ZMSCORE', MAIN, unpack(ARGV, ids, last))
  -- A waiter is recognised by its place, not by its score in `alive`: another program's expiry may have removed either
  -- key.
  places = call('ZMSCORE', WAITING, unpack(ARGV, ids, last))
  hold_until = call('ZMSCORE', TTL, unpack(ARGV, ids, last))
  known = call('HMGET', INFO, unpack(ARGV, ids, last))
end
read_members()
local granted_elsewhere = {}
for i = 1, last - ids + 1 do
  local id = ARGV[ids + i - 1]
  if renew_by[i] and not holding[id] and is_granted_elsewhere(known[i]) then
    granted_elsewhere[#granted_elsewhere + 1] = id
  end
end
if #granted_elsewhere > 0 then
  take_back(held > PAGE and granted_elsewhere or nil)
  grant()
  read_members()
end
for i = 1, last - ids + 1 do
  local id = ARGV[ids + i - 1]
  if holding[id] then
    answer('held', hold_again(id, terms))
  elseif renew_by[i] then
    local info = parse(known[i])
    local label = info.text and string.match(info.text, '^%S+ %S+ ?(.*)$') or ''
    local lease = info.fence and terms or terms_of(ARGV[first] .. ' ' .. ARGV[first + 1] .. ' ' .. label)
    answer('held', renew_holder(id, info, hold_until[i], lease))
  elseif places[i] then
    renew_waiter(id, terms)
    answer('waiting', call('ZRANK', WAITING, id))
  else
    answer(missing(id))
  end
end
-- Renewals are repeated, so they also extend all keys whose expiry other programs have set too short.
read_capacity()
flush('all keys')
