-- Changes the limits of a name, for an operator.
--
-- ARGV    1 what      "declare" | "pin" | "unpin" | "rate" | "pause" | "resume" | "forget"
--         2 capacity  the capacity to declare or to pin; for a rate "count period burst", where a count of 0 means
--                   none
--         3 by        who pauses the name
--         4 reason
-- Result  four: "done" | "unknown": there is nothing to end or to remove | "pinned", to what | "in use", holders, waiters
tidy('asks')
local what, text = ARGV[first], ARGV[first + 1]
local ends = what == 'unpin' or what == 'resume' or what == 'forget'
read_capacity()
if limits.declared == 0 and DECLARED ~= '0' then limits.declared, limits.changed = tonumber(DECLARED), true end
if what == 'forget' and held + queued > 0 then
  answer('in use', held, queued)
elseif capacity == 0 and ends and not limits.paused and not limits.interval then
  answer('unknown')
elseif what == 'declare' and limits.pinned then
  answer('pinned', limits.pinned)
else
  if limits.is_unknown then max = DECLARED end
  limits.changed, news = what ~= 'declare' or limits.changed, true
  if what == 'declare' then
    capacity, max = tonumber(text), text
  elseif what == 'pin' then
    if not limits.pinned then limits.declared = capacity end
    limits.pinned, capacity, max = tonumber(text), tonumber(text), text
  elseif what == 'unpin' and limits.pinned then
    capacity, max = limits.declared, string.format('%d', limits.declared)
    -- Nobody has declared a capacity.
    if capacity == 0 then
      call('DEL', MAX)
      max = nil
    end
    limits.pinned, limits.declared = nil, nil
  elseif what == 'rate' then
    set_rate(string.match(text, '^(%d+) (%d+) (%d+)$'))
  elseif what == 'pause' then
    limits.paused, limits.by, limits.reason = limits.paused or NOW, ARGV[first + 2], ARGV[first + 3]
  elseif what == 'resume' then
    limits.paused, limits.by, limits.reason = nil, nil, nil
  elseif what == 'forget' then
    forget_name()
  end
  answer('done')
  grant()
end
