"""A lesson that a student has started, once with the constraint and once without."""

from __future__ import annotations

from django.conf import settings
from django.db import models


class AbstractLessonSession(models.Model):
    # Made by the client, so that a retry carries the same one.
    uuid = models.UUIDField(db_index=True)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    course = models.CharField(max_length=100)
    active = models.BooleanField(default=True)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.course} ({self.uuid})"


class AbstractStudyTime(models.Model):
    started_at = models.DateTimeField()

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.started_at:%Y-%m-%d %H:%M}"


class LessonSession(AbstractLessonSession):
    uuid = models.UUIDField(unique=True)


class StudyTime(AbstractStudyTime):
    session = models.ForeignKey(LessonSession, on_delete=models.CASCADE, related_name="study_times")


class LooseLessonSession(AbstractLessonSession):
    """The twin without the unique constraint: here nothing but the lock stands in the way."""


class LooseStudyTime(AbstractStudyTime):
    session = models.ForeignKey(
        LooseLessonSession, on_delete=models.CASCADE, related_name="study_times"
    )
