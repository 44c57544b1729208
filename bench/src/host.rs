//! Facts about the host and its processes, read from the kernel.

use std::time::Duration;

/// Returns the time in nanoseconds, by a clock that all processes of this host share.
pub(crate) fn nanos() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let (seconds, rest) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds.expect("since the start") * 1_000_000_000 + rest.expect("less than a second")
}

/// Returns the time until that moment; zero if it has passed.
pub(crate) fn until(moment: u64) -> Duration {
    Duration::from_nanos(moment.saturating_sub(nanos()))
}

/// Returns the resident memory of a process, in bytes.
pub(crate) fn resident(pid: u32) -> Option<u64> {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).ok()?;
    let pages: u64 = statm.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * 4096)
}

/// Returns the processor time of each thread of a process and of its children, in nanoseconds. The ticks of
/// `/proc/PID/stat` are too coarse: a process that waits uses less than one tick in ten seconds.
pub(crate) fn processor_times(pid: u32) -> Vec<(u32, u64)> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let mut times = Vec::new();
    for thread in threads.flatten() {
        // A thread may end meanwhile.
        let read = |file| std::fs::read_to_string(thread.path().join(file)).unwrap_or_default();
        let id = thread.file_name().to_str().and_then(|id| id.parse().ok());
        let nanos = read("schedstat").split(' ').next().and_then(|nanos| nanos.parse().ok());
        times.extend(id.zip(nanos));
        let children = read("children");
        let children = children.split_whitespace().filter_map(|child| child.parse().ok());
        times.extend(children.flat_map(processor_times));
    }
    times
}

/// Describes the machine in one line: its processor, its kernel and its load.
pub(crate) fn describe() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let info = read("/proc/cpuinfo");
    let model = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let load = read("/proc/loadavg");
    format!(
        "{} × {}, Linux {}, load {}",
        cores,
        model.map_or("unknown processor", |(_, model)| model),
        read("/proc/sys/kernel/osrelease").trim(),
        load.split(' ').take(3).collect::<Vec<_>>().join(" "),
    )
}
