//! Descriptors that a forked copy of the process does not keep.
//!
//! The kernel closes a descriptor on `exec` if it has the flag `FD_CLOEXEC`; there is no such flag for `fork`. A copy
//! has every descriptor of the original. While the copy lives, the original's locks (`flock`) stay locked and its
//! connections stay open, even after the original was killed.
//!
//! So [`CloseOnFork`] registers its descriptor, and a handler (`pthread_atfork`) runs in every copy before `fork`
//! returns there. The argument why that is safe:
//!
//! - **The handler calls only async-signal-safe functions and takes no lock**, because another thread of the original
//!   may have held any lock. It reads the registry, which consists of atomics in memory that is never freed.
//! - **The number stays in use.** The copy's memory still has the [`CloseOnFork`], which closes the number when it is
//!   dropped. So the handler does not close the number, but replaces what it refers to by an unconnected socket, of
//!   which there is nothing to keep. Otherwise the drop could close a file that the copy has opened meanwhile.
//! - **Nothing else is replaced.** The registry contains the device and the inode of each descriptor. If the number
//!   refers to something else, because the program closed it behind our back, the handler leaves it alone.
//! - **No descriptor is missed.** Opening and registering happen in one [`Section`], unregistering and closing in
//!   another. Before a fork, the handler waits until no thread is in a section, and threads wait with theirs until the
//!   fork is over.
//! - **Nothing waits forever.** Both waits end after [`LONGEST_WAIT`], for example if a signal handler forks while its
//!   thread is in a section. Then a copy may keep a descriptor, as it would without this module.

use std::fmt;
use std::io;
use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long a fork waits for sections to end, and a section for forks to end.
const LONGEST_WAIT: Duration = Duration::from_secs(1);
/// The pause between two checks. Sections and forks usually take less.
const PAUSE: Duration = Duration::from_micros(50);

/// A value with a descriptor that a forked copy of this process does not keep.
///
/// In the copy the descriptor refers to an unconnected socket instead, and every use of it fails. An exception: a
/// descriptor without the flag `FD_CLOEXEC` is left to the copy, because the program wants it to be inherited.
///
/// The value must have the same descriptor for as long as it lives. Duplicates of the descriptor are not covered, and
/// neither are copies that are made without the C library's `fork`, for example with the system call `clone`.
pub struct CloseOnFork<T> {
    /// `None` only while it is dropped or converted.
    value: Option<T>,
    slot: Option<&'static Slot>,
}

impl<T: AsRawFd> CloseOnFork<T> {
    /// Opens a descriptor with `open`, which must not block: no thread can fork meanwhile.
    ///
    /// # Errors
    /// The error of `open`, or the system's error if the handler cannot be installed.
    pub fn open(open: impl FnOnce() -> io::Result<T>) -> io::Result<Self> {
        install()?;
        let _section = Section::enter();
        let value = open()?;
        let slot = register(value.as_raw_fd())?;
        Ok(Self { value: Some(value), slot: Some(slot) })
    }

    /// Converts the value, which may change its descriptor, with `convert`, which must not block.
    ///
    /// # Errors
    /// The error of `convert`. The value is then gone.
    #[allow(clippy::missing_panics_doc)] // the value is there
    pub fn try_map<U: AsRawFd>(
        mut self,
        convert: impl FnOnce(T) -> io::Result<U>,
    ) -> io::Result<CloseOnFork<U>> {
        let _section = Section::enter();
        self.unregister();
        let value = self.value.take().map(convert).transpose()?;
        let slot = value.as_ref().map(|value| register(value.as_raw_fd())).transpose()?;
        Ok(CloseOnFork { value, slot })
    }
}

impl<T> CloseOnFork<T> {
    /// Call it in a section, before the descriptor is closed. After that, another thread may be given its number.
    fn unregister(&mut self) {
        if let Some(slot) = self.slot.take() {
            slot.fd.store(FREE, Ordering::SeqCst);
        }
    }
}

impl<T> Deref for CloseOnFork<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("the value is there until it is dropped")
    }
}

impl<T: AsRawFd> AsRawFd for CloseOnFork<T> {
    fn as_raw_fd(&self) -> RawFd {
        (**self).as_raw_fd()
    }
}

impl<T: AsFd> AsFd for CloseOnFork<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        (**self).as_fd()
    }
}

impl<T: fmt::Debug> fmt::Debug for CloseOnFork<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CloseOnFork").field(&self.value).finish()
    }
}

impl<T> Drop for CloseOnFork<T> {
    fn drop(&mut self) {
        if self.slot.is_some() {
            let _section = Section::enter();
            self.unregister();
            self.value = None;
        }
    }
}

/// The number of threads that are in a section, and the number that are forking.
static SECTIONS: AtomicI32 = AtomicI32::new(0);
static FORKS: AtomicI32 = AtomicI32::new(0);

/// A time in which no thread can fork.
struct Section;

impl Section {
    fn enter() -> Self {
        let mut until = None;
        loop {
            // Each side first counts itself and then looks at the other's count, so at least one sees the other.
            SECTIONS.fetch_add(1, Ordering::SeqCst);
            if FORKS.load(Ordering::SeqCst) <= 0 {
                return Self;
            }
            if Instant::now() >= *until.get_or_insert_with(|| Instant::now() + LONGEST_WAIT) {
                return Self;
            }
            SECTIONS.fetch_sub(1, Ordering::SeqCst);
            thread::sleep(PAUSE);
        }
    }
}

impl Drop for Section {
    fn drop(&mut self) {
        SECTIONS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The contents of a slot without a descriptor: free, or being filled.
const FREE: RawFd = -1;
const TAKEN: RawFd = -2;

/// One registered descriptor.
struct Slot {
    fd: AtomicI32,
    device: AtomicU64,
    inode: AtomicU64,
}

impl Slot {
    const fn new() -> Self {
        Self { fd: AtomicI32::new(FREE), device: AtomicU64::new(0), inode: AtomicU64::new(0) }
    }
}

/// Some slots, and the block that follows when they are full. Blocks are never freed.
struct Block {
    slots: [Slot; 32],
    next: AtomicPtr<Block>,
}

impl Block {
    const fn new() -> Self {
        Self { slots: [const { Slot::new() }; 32], next: AtomicPtr::new(ptr::null_mut()) }
    }

    fn next(&self) -> Option<&'static Self> {
        // SAFETY: the pointer is null or comes from `Box::into_raw` in `next_or_new`, and the block is never freed.
        unsafe { self.next.load(Ordering::SeqCst).as_ref() }
    }

    fn next_or_new(&self) -> &'static Self {
        if let Some(next) = self.next() {
            return next;
        }
        let new = Box::into_raw(Box::new(Self::new()));
        let null = ptr::null_mut();
        match self.next.compare_exchange(null, new, Ordering::SeqCst, Ordering::SeqCst) {
            // SAFETY: the block has just been created, and is never freed from here on.
            Ok(_) => unsafe { &*new },
            Err(other) => {
                // SAFETY: nobody else has seen the block that was created in vain.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: another thread has created this one in the same way.
                unsafe { &*other }
            }
        }
    }
}

static FIRST: Block = Block::new();

/// Call it in a section.
fn register(fd: RawFd) -> io::Result<&'static Slot> {
    let (device, inode) = identity(fd).ok_or_else(io::Error::last_os_error)?;
    let mut block = &FIRST;
    loop {
        for slot in &block.slots {
            let taken =
                slot.fd.compare_exchange(FREE, TAKEN, Ordering::SeqCst, Ordering::SeqCst).is_ok();
            if taken {
                slot.device.store(device, Ordering::SeqCst);
                slot.inode.store(inode, Ordering::SeqCst);
                slot.fd.store(fd, Ordering::SeqCst);
                return Ok(slot);
            }
        }
        block = block.next_or_new();
    }
}

/// Returns the device and the inode of an open descriptor.
#[allow(clippy::unnecessary_cast, clippy::cast_sign_loss)] // the types differ between systems
fn identity(fd: RawFd) -> Option<(u64, u64)> {
    let mut stat = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: `stat` has room for the answer, and any number may be passed as a descriptor.
    if unsafe { libc::fstat(fd, stat.as_mut_ptr()) } != 0 {
        return None;
    }
    // SAFETY: `fstat` has succeeded, so it has filled the structure.
    let stat = unsafe { stat.assume_init() };
    Some((stat.st_dev as u64, stat.st_ino as u64))
}

/// Installs the handlers. If two threads do so at once, the handlers run twice, which does no harm. A lock here could
/// be held by another thread at the time of a fork.
fn install() -> io::Result<()> {
    static INSTALLED: AtomicBool = AtomicBool::new(false);
    if INSTALLED.load(Ordering::SeqCst) {
        return Ok(());
    }
    // SAFETY: the handlers are functions of this program, which are never unloaded, and they do not unwind.
    match unsafe { libc::pthread_atfork(Some(before), Some(in_original), Some(in_copy)) } {
        0 => INSTALLED.store(true, Ordering::SeqCst),
        error => return Err(io::Error::from_raw_os_error(error)),
    }
    Ok(())
}

/// Runs in the thread that forks, before the fork.
extern "C" fn before() {
    FORKS.fetch_add(1, Ordering::SeqCst);
    let mut until = None;
    while SECTIONS.load(Ordering::SeqCst) > 0 {
        if Instant::now() >= *until.get_or_insert_with(|| Instant::now() + LONGEST_WAIT) {
            return;
        }
        thread::sleep(PAUSE);
    }
}

/// Runs in the original after the fork, whether or not it has succeeded.
extern "C" fn in_original() {
    FORKS.fetch_sub(1, Ordering::SeqCst);
}

/// Runs in the copy before `fork` returns there.
extern "C" fn in_copy() {
    // The threads that were counted do not exist here.
    FORKS.store(0, Ordering::SeqCst);
    SECTIONS.store(0, Ordering::SeqCst);
    let mut substitute = None;
    let mut next = Some(&FIRST);
    while let Some(block) = next {
        for slot in &block.slots {
            let stored = (slot.device.load(Ordering::SeqCst), slot.inode.load(Ordering::SeqCst));
            let fd = slot.fd.load(Ordering::SeqCst);
            if fd >= 0 && identity(fd) == Some(stored) && closes_on_exec(fd) {
                replace(fd, &mut substitute);
            }
        }
        next = block.next();
    }
    if let Some(substitute) = substitute {
        // SAFETY: this module has opened it, and nothing else knows of it.
        unsafe { libc::close(substitute) };
    }
}

fn closes_on_exec(fd: RawFd) -> bool {
    // SAFETY: `F_GETFD` takes no argument and changes nothing.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFD) };
    flags >= 0 && flags & libc::FD_CLOEXEC != 0
}

/// Makes the number refer to an unconnected socket. If there can be none, the number is closed: a lock that stays locked
/// blocks other processes, and the copy closes the number once more only if it drops what its original had opened.
fn replace(fd: RawFd, substitute: &mut Option<RawFd>) {
    if substitute.is_none() {
        // SAFETY: these calls take no pointers.
        let socket = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM, 0) };
        if socket >= 0 {
            // SAFETY: as above. It does not block, so a read by mistake fails at once.
            unsafe { libc::fcntl(socket, libc::F_SETFL, libc::O_NONBLOCK) };
            *substitute = Some(socket);
        }
    }
    // SAFETY: these calls take no pointers, and the registry says that the number belongs to a `CloseOnFork`.
    unsafe {
        if substitute.is_some_and(|substitute| libc::dup2(substitute, fd) >= 0) {
            libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC);
        } else {
            libc::close(fd);
        }
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::fs::{self, File, OpenOptions};
    use std::os::fd::IntoRawFd;
    use std::path::PathBuf;
    use std::sync::Mutex;
    use std::sync::atomic::AtomicU32;

    use super::*;
    use crate::fork_idle;

    /// A forked copy of this process. It is killed when dropped.
    struct Copy(i32);

    impl Copy {
        fn new() -> Self {
            Self(fork_idle(60).unwrap())
        }

        /// Returns what a descriptor of the copy refers to, if it is open there.
        fn descriptor_path(&self, fd: RawFd) -> Option<PathBuf> {
            // The handler runs before the copy sleeps, but maybe after `fork` has returned here.
            let until = Instant::now() + Duration::from_secs(20);
            while !self.sleeps() {
                assert!(Instant::now() < until, "the copy does not sleep");
                thread::sleep(Duration::from_millis(1));
            }
            fs::read_link(format!("/proc/{}/fd/{fd}", self.0)).ok()
        }

        fn sleeps(&self) -> bool {
            let stat = fs::read_to_string(format!("/proc/{}/stat", self.0)).unwrap();
            stat.rsplit(") ").next().is_some_and(|fields| fields.starts_with('S'))
        }
    }

    impl Drop for Copy {
        fn drop(&mut self) {
            // SAFETY: the copy is ours, and was not reaped before.
            unsafe {
                libc::kill(self.0, libc::SIGKILL);
                libc::waitpid(self.0, ptr::null_mut(), 0);
            }
        }
    }

    /// A file of this test. It is removed when dropped.
    struct TestFile(PathBuf);

    impl TestFile {
        fn new() -> Self {
            static NUMBER: AtomicU32 = AtomicU32::new(0);
            let number = NUMBER.fetch_add(1, Ordering::SeqCst);
            let name = format!("lone-fork-{}-{number}", std::process::id());
            let path = std::env::temp_dir().join(name);
            fs::write(&path, "").unwrap();
            Self(path)
        }

        fn open(&self) -> io::Result<File> {
            OpenOptions::new().read(true).write(true).open(&self.0)
        }

        fn open_close_on_fork(&self) -> CloseOnFork<File> {
            CloseOnFork::open(|| self.open()).unwrap()
        }
    }

    impl Drop for TestFile {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    /// Held by tests that depend on how long sections last.
    static SECTIONS_ARE_OURS: Mutex<()> = Mutex::new(());

    fn try_lock(file: &impl AsRawFd) -> bool {
        // SAFETY: it takes no pointers.
        unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
    }

    #[test]
    fn a_lock_ends_with_its_file_although_a_copy_lives() {
        let path = TestFile::new();
        let file = path.open_close_on_fork();
        assert!(try_lock(&file));
        let copy = Copy::new();
        let replaced = copy.descriptor_path(file.as_raw_fd()).expect("the number is still in use");
        assert!(replaced.to_str().unwrap().starts_with("socket:"), "{replaced:?}");
        assert!(!try_lock(&path.open().unwrap()), "the original still has the lock");
        drop(file);
        // A copy that another test has just made has the lock until its handler has run.
        let until = Instant::now() + Duration::from_secs(20);
        while !try_lock(&path.open().unwrap()) {
            assert!(Instant::now() < until, "the copy has kept the lock");
            thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn any_number_of_descriptors_is_covered() {
        let path = TestFile::new();
        let files: Vec<_> = (0..100).map(|_| path.open_close_on_fork()).collect();
        let copy = Copy::new();
        for file in &files {
            assert_ne!(copy.descriptor_path(file.as_raw_fd()), Some(path.0.clone()));
        }
    }

    #[test]
    fn a_converted_value_is_covered() {
        let path = TestFile::new();
        let file = path.open_close_on_fork();
        let file = file.try_map(|file| Ok(std::os::fd::OwnedFd::from(file))).unwrap();
        assert_ne!(Copy::new().descriptor_path(file.as_raw_fd()), Some(path.0.clone()));
    }

    #[test]
    fn an_inheritable_descriptor_is_not_closed() {
        let path = TestFile::new();
        let file = path.open_close_on_fork();
        // SAFETY: it takes no pointers.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFD, 0) };
        assert_eq!(Copy::new().descriptor_path(file.as_raw_fd()), Some(path.0.clone()));
    }

    #[test]
    fn a_reused_descriptor_number_is_not_closed() {
        let (path, other) = (TestFile::new(), TestFile::new());
        let file = path.open_close_on_fork();
        let reused = other.open().unwrap().into_raw_fd();
        // SAFETY: they take no pointers. From here on the number refers to the other file, as if the program had closed
        // it and opened another file.
        unsafe {
            libc::dup2(reused, file.as_raw_fd());
            libc::fcntl(file.as_raw_fd(), libc::F_SETFD, libc::FD_CLOEXEC);
            libc::close(reused);
        }
        assert_eq!(Copy::new().descriptor_path(file.as_raw_fd()), Some(other.0.clone()));
    }

    /// Threads open and close files while others fork.
    #[test]
    fn no_copy_inherits_a_descriptor_in_any_interleaving() {
        let _ours = SECTIONS_ARE_OURS.lock().unwrap();
        let (path, ended) = (TestFile::new(), AtomicBool::new(false));
        let copies: Vec<_> = thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    while !ended.load(Ordering::SeqCst) {
                        drop(path.open_close_on_fork());
                    }
                });
            }
            let forks: Vec<_> = (0..2)
                .map(|_| scope.spawn(|| (0..50).map(|_| Copy::new()).collect::<Vec<_>>()))
                .collect();
            let copies = forks.into_iter().flat_map(|fork| fork.join().unwrap()).collect();
            ended.store(true, Ordering::SeqCst);
            copies
        });
        for copy in copies {
            copy.descriptor_path(0);
            for entry in fs::read_dir(format!("/proc/{}/fd", copy.0)).unwrap() {
                let target = fs::read_link(entry.unwrap().path()).unwrap();
                assert_ne!(target, path.0);
            }
        }
    }

    /// As a signal handler may do it.
    #[test]
    fn a_fork_inside_of_a_section_does_not_wait_forever() {
        let _ours = SECTIONS_ARE_OURS.lock().unwrap();
        install().unwrap();
        let begun = Instant::now();
        let section = Section::enter();
        let _copy = Copy::new();
        assert!(begun.elapsed() >= LONGEST_WAIT);
        drop(section);
    }
}
