//! A wall clock that can be set, but only for the processes that were started with it:
//!
//! ```sh
//! LD_PRELOAD=libstepped_clock.so STEPPED_CLOCK=FILE redis-server …
//! ```
//!
//! The first eight bytes of the file are a signed number in the machine's byte order: by how many microseconds the
//! clock is ahead. Writing to the file sets the clock of all these processes at once. Monotonic clocks are not changed.
#![cfg(target_os = "linux")]

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI64, AtomicPtr, Ordering};

use libc::{clockid_t, time_t, timespec, timeval};

const MICROS: i64 = 1_000_000;

/// Returns by how many microseconds the clock is ahead, or 0 without a file.
///
/// Some allocators read the clock before they can allocate, and would read it again if this function allocated. So
/// nothing here allocates. The file is mapped, because a descriptor would not survive in a process that closes all
/// descriptors it does not know.
fn ahead() -> i64 {
    static MAPPED: AtomicPtr<AtomicI64> = AtomicPtr::new(null_mut());
    let mut at = MAPPED.load(Ordering::Acquire);
    if at.is_null() {
        let none: *mut AtomicI64 = (&raw const NONE).cast_mut();
        at = map().unwrap_or(none);
        MAPPED.store(at, Ordering::Release);
    }
    // SAFETY: the mapping is never unmapped and is aligned to a page. Other processes write the whole number at once.
    unsafe { &*at }.load(Ordering::Relaxed)
}

static NONE: AtomicI64 = AtomicI64::new(0);

/// Maps the file. If two threads do this at once, there are two mappings of the same file.
fn map() -> Option<*mut AtomicI64> {
    // SAFETY: the name ends with a zero.
    let path = unsafe { libc::getenv(c"STEPPED_CLOCK".as_ptr()) };
    if path.is_null() {
        return None;
    }
    // SAFETY: the value of an environment variable ends with a zero.
    let file = unsafe { libc::open(path, libc::O_RDONLY | libc::O_CLOEXEC) };
    let length = size_of::<AtomicI64>();
    // SAFETY: a new mapping does not affect existing ones. Without a file it fails.
    let at = unsafe { libc::mmap(null_mut(), length, libc::PROT_READ, libc::MAP_SHARED, file, 0) };
    // SAFETY: no other code knows this descriptor.
    unsafe { libc::close(file) };
    (at != libc::MAP_FAILED).then_some(at.cast())
}

/// `clock_gettime(2)`.
///
/// # Safety
/// The same as for `clock_gettime(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: clockid_t, time: *mut timespec) -> c_int {
    // SAFETY: guaranteed by the caller.
    let answer = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) };
    if answer != 0 {
        return -1;
    }
    if [libc::CLOCK_REALTIME, libc::CLOCK_REALTIME_COARSE].contains(&clock) {
        // SAFETY: the system call has just written to it.
        let time = unsafe { &mut *time };
        let micros = time.tv_nsec / 1000 + ahead();
        time.tv_sec += micros.div_euclid(MICROS);
        time.tv_nsec = micros.rem_euclid(MICROS) * 1000 + time.tv_nsec % 1000;
    }
    0
}

fn wall() -> Option<timespec> {
    let mut now = timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` has room for the result.
    (unsafe { clock_gettime(libc::CLOCK_REALTIME, &raw mut now) } == 0).then_some(now)
}

/// `gettimeofday(2)`.
///
/// # Safety
/// The same as for `gettimeofday(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gettimeofday(time: *mut timeval, _zone: *mut c_void) -> c_int {
    let Some(now) = wall() else { return -1 };
    if !time.is_null() {
        // SAFETY: guaranteed by the caller.
        unsafe { time.write(timeval { tv_sec: now.tv_sec, tv_usec: now.tv_nsec / 1000 }) };
    }
    0
}

/// `time(2)`.
///
/// # Safety
/// The same as for `time(2)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn time(time: *mut time_t) -> time_t {
    let now = wall().map_or(-1, |now| now.tv_sec);
    if !time.is_null() {
        // SAFETY: guaranteed by the caller.
        unsafe { time.write(now) };
    }
    now
}
