//! One connection through the proxy: bytes in both directions, and the faults that apply to them.
//!
//! Each direction is a reader and a writer with a queue between them. The reader splits the stream
//! into messages and notes when each is due. The writer decides the fate of a message at the moment
//! when it would be forwarded. So a delay adds latency without lowering throughput, and a fault
//! also applies to what is already under way.

use std::cell::Cell;
use std::future::pending;
use std::io;
use std::net::Ipv4Addr;
use std::ops::ControlFlow::{Break, Continue};
use std::sync::atomic::Ordering;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep_until};

use super::Cut;
use super::resp::{Framer, Message, confirms_subscription, is_push, is_subscription};
use super::state::{LossTarget, Shared};

/// What happens to one message.
enum Fate {
    Pass,
    /// Forwarded, and nothing after it in this direction.
    PassAsLast,
    /// Not forwarded; the connection ends.
    Lose,
}

/// The message of the server to be lost on this connection.
#[derive(Clone, Copy)]
enum MessageToLose {
    /// The answer to the request of this number.
    Reply(u64),
    /// The confirmation of a subscription, which is a push and has no number.
    Confirmation,
}

struct Relay<'a> {
    shared: &'a Shared,
    id: u64,
    /// The number of forwarded requests that have one reply each, and the number of replies so far.
    /// The server answers in order, so equal numbers belong together.
    requested: Cell<u64>,
    replied: Cell<u64>,
    doomed: Cell<Option<MessageToLose>>,
}

/// Serves one accepted connection until it ends, by itself or by a fault.
pub(super) async fn serve(shared: &Shared, id: u64, mut client: TcpStream) {
    let how = tokio::select! {
        biased;
        how = shared.cut_of(id) => how,
        how = converse(shared, id, &mut client) => how,
    };
    // An error means that the client closed first, which has the same effect.
    match how {
        Cut::Reset => {
            let _ = client.set_zero_linger();
        }
        Cut::Close => {
            let _ = client.shutdown().await;
            // Unread bytes would turn the close into a reset.
            let mut unread = [0; 4096];
            while client.try_read(&mut unread).is_ok_and(|count| count > 0) {}
        }
    }
}

async fn converse(shared: &Shared, id: u64, client: &mut TcpStream) -> Cut {
    let upstream = (Ipv4Addr::LOCALHOST, shared.upstream.load(Ordering::SeqCst));
    let Ok(mut server) = TcpStream::connect(upstream).await else { return Cut::Reset };
    for socket in [&*client, &server] {
        // A proxy must not add Nagle's delay. This fails only on a connection that is already broken.
        let _ = socket.set_nodelay(true);
    }
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    let relay = Relay {
        shared,
        id,
        requested: Cell::new(0),
        replied: Cell::new(0),
        doomed: Cell::new(None),
    };
    let up = relay.pump(from_client, to_server, |message| relay.request(message));
    let down = relay.pump(from_server, to_client, |message| relay.reply(message));
    // `Ok` means that both directions ended in order. After an error in one, the other is useless.
    match tokio::try_join!(up, down) {
        Ok(_) => Cut::Close,
        Err(how) => how,
    }
}

impl Relay<'_> {
    async fn pump(
        &self,
        from: ReadHalf<'_>,
        to: WriteHalf<'_>,
        fate: impl Fn(&Message) -> Fate,
    ) -> Result<(), Cut> {
        let (sender, receiver) = unbounded_channel();
        let reading = async { self.read(from, sender).await.map_err(|_| Cut::Reset) };
        tokio::try_join!(reading, self.write(to, receiver, fate)).map(|_| ())
    }

    async fn read(
        &self,
        mut from: ReadHalf<'_>,
        queue: UnboundedSender<(Instant, Message)>,
    ) -> io::Result<()> {
        let mut framer = Framer::new();
        let mut chunk = vec![0; 16 * 1024];
        loop {
            let count = from.read(&mut chunk).await?;
            let due = Instant::now() + self.shared.delay();
            let rest = if count == 0 { framer.rest() } else { None };
            for message in framer.push(&chunk[..count]).into_iter().chain(rest) {
                // This fails only after the connection has ended, because the writer outlives the reader.
                let _ = queue.send((due, message));
            }
            if count == 0 {
                return Ok(());
            }
        }
    }

    async fn write(
        &self,
        mut to: WriteHalf<'_>,
        mut queue: UnboundedReceiver<(Instant, Message)>,
        fate: impl Fn(&Message) -> Fate,
    ) -> Result<(), Cut> {
        while let Some((due, message)) = queue.recv().await {
            if due > Instant::now() {
                sleep_until(due).await;
            }
            self.shared.open(self.id).await;
            let flow = match fate(&message) {
                Fate::Pass => Continue(()),
                Fate::PassAsLast => Break(()),
                Fate::Lose => return Err(Cut::Close),
            };
            to.write_all(&message.bytes).await.map_err(|_| Cut::Reset)?;
            if flow.is_break() {
                pending::<()>().await;
            }
        }
        // The end of the stream is lost or held back like any message.
        self.shared.open(self.id).await;
        to.shutdown().await.map_err(|_| Cut::Reset)
    }

    fn request(&self, message: &Message) -> Fate {
        let loss = if message.opaque { None } else { self.shared.loss_of(&message.bytes) };
        if matches!(loss, Some(LossTarget::Request)) {
            self.shared.traffic.send_modify(|traffic| traffic.lost += 1);
            return Fate::Lose;
        }
        let subscription = is_subscription(&message.bytes);
        if !subscription && !message.opaque {
            self.requested.set(self.requested.get() + 1);
        }
        self.shared.traffic.send_modify(|traffic| {
            traffic.requests += u64::from(!message.opaque);
            traffic.bytes_to_server += message.bytes.len() as u64;
        });
        if loss.is_none() {
            return Fate::Pass;
        }
        let reply = MessageToLose::Reply(self.requested.get());
        self.doomed.set(Some(if subscription { MessageToLose::Confirmation } else { reply }));
        Fate::PassAsLast
    }

    fn reply(&self, message: &Message) -> Fate {
        let push = message.opaque || is_push(&message.bytes);
        if !push {
            self.replied.set(self.replied.get() + 1);
        }
        let lost = match self.doomed.get() {
            None => false,
            Some(MessageToLose::Reply(number)) => !push && number == self.replied.get(),
            Some(MessageToLose::Confirmation) => push && confirms_subscription(&message.bytes),
        };
        self.shared.traffic.send_modify(|traffic| {
            traffic.lost += u64::from(lost);
            traffic.bytes_to_client += if lost { 0 } else { message.bytes.len() as u64 };
        });
        if lost { Fate::Lose } else { Fate::Pass }
    }
}
