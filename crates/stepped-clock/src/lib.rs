//! A wall clock that can be set, for those processes alone that were started with it:
//!
//! ```sh
//! LD_PRELOAD=libstepped_clock.so STEPPED_CLOCK=FILE redis-server …
//! ```
//!
//! The first eight bytes of the file say by how many microseconds it is ahead (a signed number, in the machine's own order),
//! and whoever writes there sets it for all of them at once. The clocks that only ever run on are left alone.
#![cfg(target_os = "linux")]

use std::ffi::{c_int, c_void};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI64, AtomicPtr, Ordering};

use libc::{clockid_t, time_t, timespec, timeval};

const MICROS: i64 = 1_000_000;

/// By how much it is ahead, if there is such a file.
///
/// Some allocator asks for the time before it can allocate, and asks again if it has to meanwhile: so nothing here does. The
/// file is mapped, because a descriptor would not survive a process that closes all it does not know.
fn ahead() -> i64 {
    static MAPPED: AtomicPtr<AtomicI64> = AtomicPtr::new(null_mut());
    let mut at = MAPPED.load(Ordering::Acquire);
    if at.is_null() {
        let none: *mut AtomicI64 = (&raw const NONE).cast_mut();
        at = map().unwrap_or(none);
        MAPPED.store(at, Ordering::Release);
    }
    // SAFETY: what is mapped is never unmapped, is aligned to a page, and others write to it whole.
    unsafe { &*at }.load(Ordering::Relaxed)
}

static NONE: AtomicI64 = AtomicI64::new(0);

/// Should two threads do this at once, there are two mappings of the same file.
fn map() -> Option<*mut AtomicI64> {
    // SAFETY: the name ends with a zero.
    let path = unsafe { libc::getenv(c"STEPPED_CLOCK".as_ptr()) };
    if path.is_null() {
        return None;
    }
    // SAFETY: what the environment has ends with a zero.
    let file = unsafe { libc::open(path, libc::O_RDONLY | libc::O_CLOEXEC) };
    let length = size_of::<AtomicI64>();
    // SAFETY: a new mapping touches nothing that is there. Without a file it fails.
    let at = unsafe { libc::mmap(null_mut(), length, libc::PROT_READ, libc::MAP_SHARED, file, 0) };
    // SAFETY: nobody else knows of this descriptor.
    unsafe { libc::close(file) };
    (at != libc::MAP_FAILED).then_some(at.cast())
}

/// `clock_gettime(2)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clock_gettime(clock: clockid_t, time: *mut timespec) -> c_int {
    // SAFETY: as the caller says.
    let answer = unsafe { libc::syscall(libc::SYS_clock_gettime, clock, time) };
    if answer != 0 {
        return -1;
    }
    if [libc::CLOCK_REALTIME, libc::CLOCK_REALTIME_COARSE].contains(&clock) {
        // SAFETY: it was written to just now.
        let time = unsafe { &mut *time };
        let micros = time.tv_nsec / 1000 + ahead();
        time.tv_sec += micros.div_euclid(MICROS);
        time.tv_nsec = micros.rem_euclid(MICROS) * 1000 + time.tv_nsec % 1000;
    }
    0
}

fn wall() -> Option<timespec> {
    let mut now = timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: there is room for it.
    (unsafe { clock_gettime(libc::CLOCK_REALTIME, &raw mut now) } == 0).then_some(now)
}

/// `gettimeofday(2)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn gettimeofday(time: *mut timeval, _zone: *mut c_void) -> c_int {
    let Some(now) = wall() else { return -1 };
    if !time.is_null() {
        // SAFETY: as the caller says.
        unsafe { time.write(timeval { tv_sec: now.tv_sec, tv_usec: now.tv_nsec / 1000 }) };
    }
    0
}

/// `time(2)`.
///
/// # Safety
/// As there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn time(time: *mut time_t) -> time_t {
    let now = wall().map_or(-1, |now| now.tv_sec);
    if !time.is_null() {
        // SAFETY: as the caller says.
        unsafe { time.write(now) };
    }
    now
}
