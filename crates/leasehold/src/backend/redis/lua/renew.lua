-- Renews holders and waiters, and claims permits that were granted with a wake-up. Never moves a waiter.
--
-- ARGV    1 heartbeat  in microseconds
--         2 ttl        in microseconds; "-": none
--         3 ids        from here on
-- Result  four for each id: "held", slot number, fence, valid_for | "waiting", waiters ahead, 0, 0 | "gone", 0, 0, 0
tidy('asks')
local terms, ids = terms_of(ARGV[first] .. ' ' .. ARGV[first + 1] .. ' '), first + 2
-- `ZADD XX CH` answers 0 for a member that keeps its score, so the scores are read first.
local renew_by = call('ZMSCORE', MAIN, unpack(ARGV, ids, last))
-- A waiter is recognised by its place, not by its score in `alive`: another program's expiry may have removed either
-- key.
local places = call('ZMSCORE', WAITING, unpack(ARGV, ids, last))
local hold_until = call('ZMSCORE', TTL, unpack(ARGV, ids, last))
local known = call('HMGET', INFO, unpack(ARGV, ids, last))
for i = 1, last - ids + 1 do
  local id = ARGV[ids + i - 1]
  if holding[id] then
    answer('held', hold_again(id, terms))
  elseif renew_by[i] then
    local info = parse(known[i])
    local label = info.text and string.match(info.text, '^%S+ %S+ ?(.*)$') or ''
    local own = info.fence and terms or terms_of(ARGV[first] .. ' ' .. ARGV[first + 1] .. ' ' .. label)
    answer('held', renew_holder(id, info, hold_until[i], own))
  elseif places[i] then
    renew_waiter(id, terms)
    answer('waiting', call('ZRANK', WAITING, id))
  else
    forget_notification(id)
    answer('gone')
  end
end
-- Renewals are repeated, so they also extend all keys whose expiry other programs have set too short.
read_capacity()
flush('all keys')
