-- Signs of life. Never moves a waiter, and confirms nobody.
--
-- ARGV    1 heartbeat  in microseconds
--         2 ids        from here on
-- Result  four for each id: "held", slot number, fence, valid_for | "claim", slot number, 0, valid_for (granted, and
--         not yet claimed) | "waiting", 0, 0, 0 | "gone", 0, 0, 0
local terms = terms_of(ARGV[first] .. ' -')
-- `ZADD XX CH` answers 0 for a member that keeps its score, so who is there is asked for.
local renew_by = call('ZMSCORE', MAIN, unpack(ARGV, first + 1, last))
-- By its place, not by its sign of life: another program's expiry may have ended either key.
local places = call('ZMSCORE', WAITING, unpack(ARGV, first + 1, last))
local hold_until = call('ZMSCORE', TTL, unpack(ARGV, first + 1, last))
local known = call('HMGET', INFO, unpack(ARGV, first + 1, last))
alive = alive or {}
for i = 1, last - first do
  local id = ARGV[first + i]
  if holding[id] then
    answer('held', hold_again(id, terms))
  elseif renew_by[i] then
    local info = parse(known[i])
    if info.fence then
      local left = ttl_left(id, info, hold_until[i])
      renew(id, terms)
      answer('held', held, info.fence, math.min(terms.heartbeat, left or terms.heartbeat))
    else
      answer('claim', held, 0, micros(renew_by[i]) - NOW)
    end
  elseif places[i] then
    local n = #alive
    alive[n + 1], alive[n + 2] = terms.renew_by, id
    answer('waiting')
  else
    forget_notification(id)
    answer('gone')
  end
end
-- This one comes by again and again, and so sees to all that other programs' expiries would end too soon.
read_capacity()
flush('all keys')
