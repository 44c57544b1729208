//! The body of a response that holds its permit.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::BoxError;
use super::limit::HeldGuard;

pin_project! {
    /// The body of a limited response.
    ///
    /// It holds the permit until it has ended or is dropped, and fails with
    /// [`Error::Lost`](crate::Error::Lost) if the permit is lost: see the [module](super) and
    /// [`Limited`](super::Limited) for an example.
    #[derive(Debug)]
    pub struct LimitedBody<B> {
        #[pin]
        body: B,
        // Boxed, because a body without a permit is moved around, too.
        held: Option<Box<HeldGuard>>,
        // Whether the body has ended because its permit was lost.
        lost: bool,
    }
}

impl<B> LimitedBody<B> {
    pub(super) fn new(body: B, held: Option<HeldGuard>) -> Self {
        Self { body, held: held.map(Box::new), lost: false }
    }
}

impl<B: Body<Error: Into<BoxError>>> Body for LimitedBody<B> {
    type Data = B::Data;
    type Error = BoxError;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, BoxError>>> {
        let this = self.project();
        if *this.lost {
            return Poll::Ready(None);
        }
        // Check the loss first, so that nothing is produced after it.
        if let Some(Poll::Ready(error)) = this.held.as_mut().map(|held| held.poll_lost(cx)) {
            (*this.held, *this.lost) = (None, true);
            return Poll::Ready(Some(Err(error.into())));
        }
        let frame = ready!(this.body.poll_frame(cx));
        if frame.is_none() {
            // The server may keep the body although it has ended.
            *this.held = None;
        }
        Poll::Ready(frame.map(|frame| frame.map_err(B::Error::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.lost || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
