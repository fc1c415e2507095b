from __future__ import annotations

import uuid

import factory
from django.contrib.auth import get_user_model
from django.utils import timezone
from factory.django import DjangoModelFactory

from testproject.lessons import models


class UserFactory(DjangoModelFactory):
    class Meta:
        model = get_user_model()

    # Not a sequence: the database may be one that somebody else uses as well.
    username = factory.LazyFunction(lambda: f"student-{uuid.uuid4()}")


class LessonSessionFactory(DjangoModelFactory):
    class Meta:
        model = models.LessonSession

    uuid = factory.LazyFunction(uuid.uuid4)
    user = factory.SubFactory(UserFactory)
    course = "Algebra"


class StudyTimeFactory(DjangoModelFactory):
    class Meta:
        model = models.StudyTime

    session = factory.SubFactory(LessonSessionFactory)
    started_at = factory.LazyFunction(timezone.now)


class LooseLessonSessionFactory(LessonSessionFactory):
    class Meta:
        model = models.LooseLessonSession


class LooseStudyTimeFactory(StudyTimeFactory):
    class Meta:
        model = models.LooseStudyTime

    session = factory.SubFactory(LooseLessonSessionFactory)
