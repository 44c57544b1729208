//! A child that is signalled and waited for by a descriptor of the process.
//!
//! After a process was reaped, the next one may get its number. The command reaps everything that has ended
//! (`supervise.rs`), so its guard may be reaped before the command signals it or waits for it. If SIGCHLD was ignored
//! when the command started, the kernel reaps the guard by itself. A pidfd refers to the same process forever.
//!
//! There is no pidfd of a process group. Its number is taken as long as the group has a member, even a zombie. So a group
//! is signalled only while it exists.

use rustix::process::{Pid, Signal};

pub(crate) use on_this_system::ChildProcess;

#[cfg(target_os = "linux")]
mod on_this_system {
    use std::os::fd::{AsFd, OwnedFd};

    use rustix::io::retry_on_intr;
    use rustix::process::{
        PidfdFlags, WaitId, WaitIdOptions, pidfd_open, pidfd_send_signal, waitid,
    };

    use super::{Pid, Signal, by_number};

    /// A child of this process, which may have ended and may have been reaped.
    #[derive(Debug)]
    pub(crate) enum ChildProcess {
        Pidfd(OwnedFd),
        /// An old kernel or a sandbox has no pidfds, or there is no descriptor left.
        Number(Pid),
    }

    impl ChildProcess {
        /// Call it before the child can be reaped.
        pub(crate) fn new(pid: Pid) -> Self {
            pidfd_open(pid, PidfdFlags::empty()).map_or(Self::Number(pid), Self::Pidfd)
        }

        /// Does nothing if the child was reaped.
        pub(crate) fn signal(&self, signal: Signal) {
            match self {
                Self::Pidfd(pidfd) => {
                    let _ = pidfd_send_signal(pidfd, signal);
                }
                Self::Number(pid) => by_number::signal(*pid, signal),
            }
        }

        /// Waits for the end of the child, and reaps it. Returns at once if it was reaped.
        pub(crate) fn wait(&self) {
            match self {
                Self::Pidfd(pidfd) => {
                    let child = WaitId::PidFd(pidfd.as_fd());
                    let _ = retry_on_intr(|| waitid(child.clone(), WaitIdOptions::EXITED));
                }
                Self::Number(pid) => by_number::wait(*pid),
            }
        }
    }
}

#[cfg(not(target_os = "linux"))]
mod on_this_system {
    use super::{Pid, Signal, by_number};

    /// A child of this process, which may have ended and may have been reaped.
    #[derive(Debug)]
    pub(crate) struct ChildProcess(Pid);

    impl ChildProcess {
        /// Call it before the child can be reaped.
        pub(crate) fn new(pid: Pid) -> Self {
            Self(pid)
        }

        pub(crate) fn signal(&self, signal: Signal) {
            by_number::signal(self.0, signal);
        }

        /// Waits for the end of the child, and reaps it.
        pub(crate) fn wait(&self) {
            by_number::wait(self.0);
        }
    }
}

/// Without pidfds, the number is all that is known.
mod by_number {
    use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

    pub(super) fn signal(pid: Pid, signal: Signal) {
        let _ = kill_process(pid, signal);
    }

    pub(super) fn wait(pid: Pid) {
        let _ = waitpid(Some(pid), WaitOptions::empty());
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::process::{Child, Command};

    use super::*;

    /// Set in the copy of this test that runs in its own pid namespace. There the test chooses the next number.
    const IN_NAMESPACE: &str = "TEST_IN_PID_NAMESPACE";
    const NEXT: &str = "/proc/sys/kernel/ns_last_pid";

    fn sleeper() -> Child {
        Command::new("sleep").arg("1000").spawn().unwrap()
    }

    /// Starts a process whose number is that of another one, which was reaped.
    fn with_the_number_of(reaped: &Child) -> Child {
        for _ in 0..100 {
            std::fs::write(NEXT, (reaped.id() - 1).to_string()).unwrap();
            let mut next = sleeper();
            if next.id() == reaped.id() {
                return next;
            }
            next.kill().unwrap();
            next.wait().unwrap();
        }
        panic!("the number {} is never used again", reaped.id());
    }

    #[test]
    fn another_process_with_the_same_number_is_neither_signalled_nor_waited_for() {
        if std::env::var_os(IN_NAMESPACE).is_some() {
            let mut guard = sleeper();
            let process = ChildProcess::new(Pid::from_child(&guard));
            guard.kill().unwrap();
            guard.wait().unwrap();
            let mut other = with_the_number_of(&guard);
            process.signal(Signal::KILL);
            process.wait();
            assert!(other.try_wait().unwrap().is_none(), "the other process has ended");
            other.kill().unwrap();
            other.wait().unwrap();
            return;
        }
        let unshare = || {
            let mut command = Command::new("unshare");
            command.args(["--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]);
            command
        };
        let may = unshare().args(["test", "-w", NEXT]).status();
        if !may.is_ok_and(|status| status.success()) {
            return eprintln!("not tested: pid namespaces are not permitted");
        }
        let name = std::thread::current().name().map(str::to_owned).unwrap();
        let mut command = unshare();
        command.arg(std::env::current_exe().unwrap()).args(["--exact", &name]);
        let output = command.env(IN_NAMESPACE, "1").output().unwrap();
        let output_text = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && output_text.contains("1 passed"), "{output_text}");
    }

    #[test]
    fn a_child_is_signalled_and_waited_for() {
        let mut child = sleeper();
        let pid = Pid::from_child(&child);
        let process = ChildProcess::new(pid);
        assert!(matches!(process, ChildProcess::Pidfd(_)));
        process.signal(Signal::KILL);
        process.wait();
        // It was reaped.
        assert!(child.wait().is_err());

        let mut child = sleeper();
        let process = ChildProcess::Number(Pid::from_child(&child));
        process.signal(Signal::KILL);
        process.wait();
        assert!(child.wait().is_err());
    }
}
